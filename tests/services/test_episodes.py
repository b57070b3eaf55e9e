"""Trajectories of several turns: their tokens are the engine's, their columns and limits are as declared."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.ui.artifacts import draw_trees
from infra.models.load import load_model, load_tokenizer
from infra.models.tiny import END
from infra.workers.samples import MAX_SAMPLE_TEXTS
from schemas.errors import EnvironmentImportError
from schemas.rollout import RolloutHandle
from schemas.step import RunHandle
from tests.support.configs import merge
from tests.support.engine_checks import plain_logprobs
from tests.support.rollout_workers import (
    GROUPS,
    NUM_SAMPLES,
    assert_same_rows,
    evaluate,
    make_folder,
    play,
    run_of,
    worker_of,
)

ENDS = tuple(range(64))  # tokens that end a turn: a tiny model samples its real one too rarely
TURN_COLUMNS = ("turn_tokens", "turn_bridge_tokens", "turn_parents", "turn_rewards", "episode_end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def _importable_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)


def run_with(folder: Path, game: str = "Echo", **overrides: Any) -> RunHandle:
    """Return a run with an environment of `tests.support.games`, whose rewards are those of `rollout_rewards:turns`."""
    fields = {
        "environment": {"kind": "class", "path": f"tests.support.games:{game}", "num_processes": 1},
        "rollout": {"max_response_tokens": 200, "stop_token_ids": ENDS},
    }
    return run_of(folder, **merge(fields, overrides))


def turns_of(row: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of each turn, and those of the environment after it."""
    at = 0
    for sampled, between in zip(row["turn_tokens"], row["turn_bridge_tokens"], strict=True):
        yield row["response_ids"][at : at + sampled], row["response_ids"][at + sampled : at + sampled + between]
        at += sampled + between
    assert at == len(row["response_ids"])


def test_a_trajectory_is_what_the_engine_sampled_and_the_environment_answered(folder: Path) -> None:
    run = run_with(folder, "Greeting")
    shard, rows = play(run)
    model, tokenizer = load_model(run.config.model), load_tokenizer(run.config.model)
    assert len(rows) == len(GROUPS) * NUM_SAMPLES
    for number, row in enumerate(rows.values()):
        trained, sampled = np.array(row["loss_mask"]), np.array(row["sampler_logprobs"])
        expected = plain_logprobs(model, row["prompt_ids"], np.array(row["response_ids"]), 1.0)
        np.testing.assert_allclose(sampled[trained], expected[trained], rtol=0, atol=1e-5)
        assert not sampled[~trained].any()
        assert [len(turn) for turn, _ in turns_of(row)] == row["turn_tokens"]
        np.testing.assert_array_equal(
            trained,
            np.concatenate([np.repeat([True, False], [len(turn), len(between)]) for turn, between in turns_of(row)]),
        )
        assert shard.loss_tokens[number] == trained.sum()
        assert shard.response_lengths[number] == len(trained)
        assert row["prompt_text"].splitlines()[-1].startswith("I am ")
        for turn, between in [*turns_of(row)][:-1]:
            said = len(tokenizer.decode(turn[:-1]))
            assert tokenizer.decode(between).endswith(f": {said}<|assistant|>")
            assert tokenizer.decode(between).startswith(f"{END}<|user|>")
    assert {row["episode_end"] for row in rows.values()} == {"done"}
    assert sorted({len(row["turn_tokens"]) for row in rows.values()}) == [1, 2, 3]
    assert len({(row["group_id"], row["prompt_text"]) for row in rows.values()}) == len(GROUPS)
    assert shard.turns["turns"].value == np.mean([len(row["turn_tokens"]) for row in rows.values()])


def test_a_teacher_reads_what_the_environment_answered_to_the_last_turn(folder: Path) -> None:
    teacher = {"prompt": "{prompt} ({feedback})", "max_prompt_tokens": 64}
    run = run_with(folder, distillation={"teachers": {"own": teacher}})
    tokenizer = load_tokenizer(run.config.model)
    for row in play(run)[1].values():
        *_, (turn, _) = turns_of(row)
        said, prompt = len(tokenizer.decode(turn[:-1])), re.escape(row["prompt_text"])
        read = tokenizer.decode(row["teacher_prompt_ids"])
        assert re.fullmatch(rf"<\|user\|>{prompt} \(\d+: {said}\)<\|assistant\|>", read), read


@pytest.mark.parametrize("resume_rows", ["batch", "lockstep"])
def test_slow_environments_change_no_bit(folder: Path, resume_rows: str) -> None:
    settings = {"resume_rows": resume_rows, "lockstep_steps": 3}
    slow, fast = (play(run_with(folder, game, environment=settings))[1] for game in ("Slow", "Echo"))
    assert slow == fast


def test_rows_that_go_on_as_soon_as_they_are_answered_have_the_same_log_probs(folder: Path) -> None:
    found = play(run_with(folder, "Slow", environment={"resume_rows": "as_ready"}))[1]
    expected = play(run_with(folder, "Slow"))[1]
    assert found.keys() == expected.keys()
    for sample, row in found.items():
        assert row["response_ids"] == expected[sample]["response_ids"]
        np.testing.assert_allclose(row["sampler_logprobs"], expected[sample]["sampler_logprobs"], rtol=0, atol=1e-5)


def test_sample_trajectories_are_drawn(folder: Path) -> None:
    shard, rows = play(run_with(folder))
    assert len(shard.samples) == MAX_SAMPLE_TEXTS
    drawn = draw_trees(RolloutHandle(step=2, policy_version=0, shards=(shard,)))
    for sample in shard.samples:
        row = next(row for row in rows.values() if row["response_text"] == sample.response)
        lines = sample.tree.splitlines()
        assert [line.partition(":")[0] for line in lines[1:-1]] == [
            f"turn {n + 1}" for n in range(len(row["turn_tokens"]))
        ]
        assert lines[-1].startswith(f"{sum(row['loss_mask']):,} of {len(row['response_ids']):,} token")
        assert "".join(f"    {line}\n" for line in lines[1:]) in f"{drawn}\n"
    assert drawn.count("### ") == len(shard.samples)


def test_one_turn_is_the_response_without_an_environment(folder: Path) -> None:
    _, single = play(run_with(folder, environment={"arguments": {"longest": 1}}))
    _, plain = play(run_of(folder, rollout={"max_response_tokens": 200, "stop_token_ids": ENDS}))
    of_turns = {*TURN_COLUMNS, "response_text"}
    assert_same_rows(
        {
            sample: {name: value for name, value in row.items() if name not in of_turns}
            for sample, row in single.items()
        },
        {sample: {name: value for name, value in row.items() if name not in of_turns} for sample, row in plain.items()},
    )


@pytest.mark.parametrize(
    ("end", "environment", "limit"),
    [("turns", {"max_turns": 2}, 400), ("turn_length", {"max_turn_tokens": 2}, 400), ("length", {}, 40)],
)
def test_limits_end_a_trajectory(folder: Path, end: str, environment: dict[str, int], limit: int) -> None:
    run = run_with(folder, "Endless", environment=environment, rollout={"max_response_tokens": limit})
    shard, rows = play(run)
    ended = [row for row in rows.values() if row["episode_end"] == end]
    assert len(ended) >= len(rows) / 2
    assert {row["finish_reason"] for row in rows.values()} == {"length"}
    assert set(shard.truncated) == {1}
    for row in ended:
        assert len(row["response_ids"]) <= limit
        assert len(row["turn_tokens"]) <= run.config.environment.max_turns
        assert row["turn_bridge_tokens"][-1] == 0
    assert shard.turns[f"turns/ended_{end}"].value == len(ended) / len(rows)


def test_a_failed_environment_costs_its_trajectory_only(folder: Path) -> None:
    (shard, rows), (_, healthy) = play(run_with(folder, "Fragile")), play(run_with(folder, "Echo"))
    failed = {sample for sample, row in rows.items() if row["episode_end"] == "failed"}
    assert failed == {sample for sample, row in rows.items() if row["reward"] is None}
    assert len(failed) == 2 * NUM_SAMPLES == shard.turns["turns/failed"].value
    assert shard.failure is not None
    assert shard.failure.startswith("environment, ")
    for sample in rows.keys() - failed:
        assert rows[sample]["turn_rewards"] == healthy[sample]["turn_rewards"]


def test_rewards_see_the_turns(folder: Path) -> None:
    _, rows = play(run_with(folder, reward="of_turns"))
    for row in rows.values():
        assert row["reward"] == sum(row["turn_rewards"]) == row["reward_turns"] / 2


def test_a_group_function_sees_the_trajectories_of_all_samples(folder: Path) -> None:
    limits = {"kind": "group_function", "num_processes": 1}
    _, rows = play(run_with(folder, "Fragile", reward="of_group", limits=limits))
    for group in GROUPS:
        of_group = [row for row in rows.values() if row["group_id"] == group]
        totals = [sum(row["turn_rewards"]) for row in of_group]
        if of_group[0]["episode_end"] == "failed":
            assert {row["reward"] for row in of_group} == {None}
        else:
            assert [row["reward"] for row in of_group] == pytest.approx([total - np.mean(totals) for total in totals])
            assert {row["reward_samples"] for row in of_group} == {NUM_SAMPLES}


def test_agents_are_evaluated_by_the_same_code(folder: Path) -> None:
    report = evaluate(run_with(folder, reward="of_turns", eval={"temperature": 1.0}))  # of 1, 2, 3 and 1 turns
    assert (report.num_prompts, report.num_failed, report.reward) == (4, 0, 7 / 8)


def test_an_environment_that_is_not_there(folder: Path) -> None:
    with pytest.raises(EnvironmentImportError, match=r"tests\.support\.games.*Nothing"):
        worker_of(run_with(folder, "Nothing"))
