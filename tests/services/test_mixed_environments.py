"""Sources of prompts with environments of their own, in one batch and in an evaluation."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.datasets import load_run_prompts
from infra.models.tiny import CHAT_TEMPLATE, make_tokenizer
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.rollout import RolloutShard
from schemas.step import RunHandle
from tests.support.configs import run_config
from tests.support.rollout_workers import evaluate, make_folder, open_store, rows_of, run_of, worker_of
from tests.support.tiny import tiny_row, write_rows

ENDS = tuple(range(64))  # tokens that end a turn: a tiny model samples its real one too rarely
GREETING = {"kind": "class", "path": "tests.support.games:Greeting", "num_processes": 1}
ECHO = {**GREETING, "path": "tests.support.games:Echo", "arguments": {"longest": 1}, "max_turns": 2}
TOOLS = {"kind": "tools", "tools": ["tests.support.games:add"]}
NAMES = {"greeting": GREETING, "echo": ECHO, "plain": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("run"))
    for name in NAMES:
        write_rows(folder / f"{name}.jsonl", [tiny_row(number, data_source=name) for number in range(3)])
    write_rows(folder / "held-out.jsonl", [tiny_row(2, data_source=name) for name in ("plain", "greeting")])
    return folder


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def sources(folder: Path, **environments: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{"path": str(folder / f"{name}.jsonl"), "environment": each} for name, each in environments.items()]


def mixed(folder: Path, held_out: str = "held-out.jsonl", **environments: dict[str, Any] | None) -> RunHandle:
    data = {"train_path": "", "sources": sources(folder, **environments), "eval_path": str(folder / held_out)}
    rollout = {"num_prompts": 6, "samples_per_prompt": 2, "max_response_tokens": 200, "stop_token_ids": ENDS}
    return run_of(folder, reward="of_turns", data=data, rollout=rollout, eval={"temperature": 1.0})


def play(run: RunHandle) -> tuple[RolloutShard, dict[str, dict[str, Any]]]:
    store = open_store()
    worker = worker_of(run, store=store)
    try:
        shard = worker.generate(0, 0, 0, range(6))
        return shard, rows_of(store, worker, shard)
    finally:
        worker.close()


@pytest.mark.slow
def test_each_row_is_answered_by_its_source(folder: Path) -> None:
    shard, rows = play(mixed(folder, **NAMES))
    of_source = {name: [row for row in rows.values() if f'"{name}"' in row["info"]] for name in NAMES}
    assert [len(of_source[name]) for name in NAMES] == [4, 4, 4]
    for row in rows.values():
        assert row["episode_end"] == "done"
        assert row["reward"] == sum(row["turn_rewards"]) == row["reward_turns"] / 2 or row in of_source["plain"]
        assert ("I am" in row["prompt_text"]) == (row in of_source["greeting"])
    for row in of_source["plain"]:
        assert (row["turn_rewards"], row["turn_bridge_tokens"], row["reward"]) == ([0.0], [0], 0.0)
        assert all(row["loss_mask"])
    assert {len(row["turn_tokens"]) for row in of_source["greeting"]} > {1}
    assert {tuple(row["turn_rewards"]) for row in of_source["echo"]} == {(0.5,)}
    assert shard.turns["turns"].weight == len(rows)


@pytest.mark.slow
def test_slow_environments_of_one_source_change_no_bit(folder: Path) -> None:
    game = {**GREETING, "path": "tests.support.games:Echo"}
    fast, slow = (
        play(mixed(folder, greeting=GREETING, echo={**game, "path": f"tests.support.games:{name}"}, plain=None))[1]
        for name in ("Echo", "Slow")
    )
    assert slow == fast


@pytest.mark.slow
def test_held_out_rows_have_the_environment_of_their_data_source(folder: Path) -> None:
    report = evaluate(mixed(folder, **NAMES))
    rewards = {source.data_source: source.reward for source in report.sources}
    assert rewards == {"plain": 0.0, "greeting": 1.5}  # of index 2: three turns


def test_held_out_rows_of_unknown_sources_are_refused(folder: Path) -> None:
    write_rows(folder / "other.jsonl", [tiny_row(0, data_source="other")])
    with pytest.raises(DataError, match=r"no training prompt has the data_source 'other'.*: echo, greeting, plain"):
        load_run_prompts(mixed(folder, "other.jsonl", **NAMES).config, make_tokenizer())
    both = mixed(folder, greeting=GREETING, echo=GREETING).config  # all the same: any held-out row has it
    prompts, held_out = load_run_prompts(
        both.replace(data=both.data.replace(eval_path=str(folder / "other.jsonl"))), make_tokenizer()
    )
    assert held_out is not None
    assert {prompts[0].environment, held_out[0].environment} == {0}


def test_held_out_rows_of_ambiguous_sources_are_refused(folder: Path) -> None:
    twice = sources(folder, greeting=GREETING) + sources(folder, greeting=ECHO)
    config = run_config(folder, data={"train_path": "", "sources": twice, "eval_path": str(folder / "held-out.jsonl")})
    write_rows(folder / "held-out-greeting.jsonl", [tiny_row(0, data_source="greeting")])
    config = config.replace(data=config.data.replace(eval_path=str(folder / "held-out-greeting.jsonl")))
    with pytest.raises(DataError, match="data_source 'greeting' have different environments"):
        load_run_prompts(config, make_tokenizer())


def test_the_chat_template_shows_each_source_its_own_tools(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ '<|pad|>' if tools else '' }}" + CHAT_TEMPLATE
    prompts, held_out = load_run_prompts(mixed(folder, greeting=TOOLS, echo=ECHO, plain=None).config, tokenizer)
    assert held_out is not None
    for row in [prompts[0], prompts[3], prompts[6], held_out[0], held_out[1]]:
        assert (row.prompt_ids[0] == tokenizer.pad_token_id) == (row.data_source == "greeting")
    assert [prompts[row].environment for row in (0, 3, 6)] == [0, 1, None]


def config_of(folder: Path, *, reward: str = "exact", **fields: Any) -> RunConfig:
    given = [{"path": "a.jsonl", **fields}, {"path": "b.jsonl"}]
    return run_config(folder, data={"train_path": "", "sources": given}, reward={"kind": reward})


def test_a_source_without_an_environment_has_the_runs(folder: Path) -> None:
    config = run_config(folder, data={"train_path": "", "sources": sources(folder, **NAMES)}, environment=ECHO)
    assert [each and each.path.rpartition(":")[2] for each in config.environment_by_source] == [
        "Greeting", "Echo", "Echo",
    ]  # fmt: skip
    assert len(config.environments) == 2
    assert config_of(folder).environments == ()


def test_unusable_environments_of_sources(folder: Path) -> None:
    with pytest.raises(ValidationError, match=r"but b\.jsonl has none; give that one of data\.sources an environment"):
        config_of(folder, reward="environment", environment=ECHO)
    with pytest.raises(ValidationError, match="differ in admission or admission_steps"):
        run_config(
            folder, data={"train_path": "", "sources": sources(folder, echo=ECHO, plain={**ECHO, "admission": "wave"})}
        )
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        config_of(folder, environment={**ECHO, "top": 7})
