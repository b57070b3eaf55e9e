"""What a run was given, with which it goes on: its data files, its modules, and the date of its prompts."""

import datetime
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import infra.workers.inputs
from flows.recovery import find_or_create_run
from infra.datasets import load_run_prompts
from infra.models.files import weights_digest
from infra.models.load import load_tokenizer
from infra.models.tiny import CHAT_TEMPLATE
from infra.rewards.open import open_reward_scorer
from infra.storage.runs import RunDirectory, resumed_config
from infra.workers.inputs import check_files, check_inputs, data_digest, record_inputs, renew_inputs
from infra.workers.policy import PolicyWorker
from infra.workers.reward import RewardWorker, open_model_here
from infra.workers.rollout import RolloutWorker
from infra.workers.scoring import ReferenceWorker, TeacherWorker
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.reward import ModelReward, WeightedReward
from schemas.config.run import RunConfig
from schemas.errors import DataError, RunError
from schemas.step import RunHandle
from tests.support.configs import run_config
from tests.support.tiny import make_tiny_data, make_tiny_model, make_tiny_reward_model

COMPLETIONS = ["2", "two"]
REWARD = "def score(prompt, completion, answer, info):\n    return 1.0\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The config of a run of two files, whose reward is a module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    make_tiny_model(tmp_path / "model")
    make_tiny_data(tmp_path / "train.parquet", 3)
    make_tiny_data(tmp_path / "eval.jsonl", 2)
    (tmp_path / "own" / "rewards").mkdir(parents=True)  # packages, of which one has no __init__.py
    (tmp_path / "own" / "rewards" / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    (tmp_path / "own" / "rewards" / "sums.py").write_text(REWARD)
    reward = {"kind": "function", "path": "own.rewards.sums:score"}
    return run_config(tmp_path, data={"eval_path": str(tmp_path / "eval.jsonl")}, reward=reward)


def test_a_run_is_found_if_it_exists_and_else_created(config: RunConfig) -> None:
    created = find_or_create_run(config, "run-1")
    assert created.exists
    assert find_or_create_run(config.replace(steps=9), "run-1").config() == config
    with pytest.raises(RunError, match="run 'run-1' exists"):
        RunDirectory.require_absent(config, "run-1")


@pytest.mark.parametrize("name", ["train.parquet", "eval.jsonl"])
@pytest.mark.parametrize("check", [check_files, check_inputs, renew_inputs])
def test_a_changed_data_file_is_refused(
    tmp_path: Path, config: RunConfig, name: str, check: Callable[[RunDirectory, RunConfig], None]
) -> None:
    run, content = find_or_create_run(config, "run-1"), (tmp_path / name).read_bytes()
    check(run, config)
    make_tiny_data(tmp_path / name, 4)
    with pytest.raises(
        RunError, match=rf"run run-1 can't go on: the data of {tmp_path}/{name} is not what .*; restore it, or"
    ):
        check(run, config)
    (tmp_path / name).write_bytes(content)
    check(run, config)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match="no such file"):
        check(run, config)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "generation_config.json"])
def test_a_changed_tokenizer_is_refused(tmp_path: Path, config: RunConfig, name: str) -> None:
    run, file = find_or_create_run(config, "run-1"), tmp_path / "model" / name
    for content in (file.read_text() + " ", None):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(RunError, match=rf"tokenizer, chat template or generation config of {tmp_path}/model is"):
            check_files(run, config)


@pytest.fixture
def linked(tmp_path: Path, config: RunConfig) -> RunConfig:
    """The config of a run of adapters, whose model, also its reference's and its teacher's, is behind a link."""
    (tmp_path / "current").symlink_to("model")
    make_tiny_model(tmp_path / "next", seed=1)
    path = str(tmp_path / "current")
    teacher = {"teachers": {"own": {"path": path}}}
    return config.replace(model={"path": path, "lora": {"rank": 2}}, distillation=teacher, kl={"coef": 0.1})


def promote(tmp_path: Path, name: str) -> None:
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to(name)


def test_a_link_that_leads_to_another_model_is_refused(tmp_path: Path, linked: RunConfig) -> None:
    run = find_or_create_run(linked, "run-1")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    handle = RunHandle(run_id="run-1", identity="run-1", directory=run.url, config=linked, store_incarnation="")
    starts = [partial(check, run, linked) for check in (check_files, check_inputs, renew_inputs)]
    ranks = [kind(handle) for kind in (PolicyWorker, ReferenceWorker, TeacherWorker)]
    starts += [*(rank.prepare for rank in ranks), RolloutWorker(handle).start]
    promote(tmp_path, "next")
    for start in starts:
        with pytest.raises(RunError, match=rf"current is not the model that .* given, which was in {tmp_path}/model: "):
            start()
    promote(tmp_path, "copy")  # the same weights
    check_files(run, linked)
    promote(tmp_path, "next")
    record = json.loads((run.path / "inputs.json").read_text())
    del record["models"][linked.model.path]  # as the message says, or as in a record of an earlier Sluice
    (run.path / "inputs.json").write_text(json.dumps(record))
    renew_inputs(run, linked)
    promote(tmp_path, "model")
    with pytest.raises(RunError, match=rf"which was in {tmp_path}/next"):
        check_files(run, linked)


def test_another_reward_model_in_the_same_folder_is_refused(tmp_path: Path, config: RunConfig) -> None:
    path = make_tiny_reward_model(tmp_path / "liked")
    config = config.replace(reward=ModelReward(path=str(path), max_tokens=100))
    run = find_or_create_run(config, "run-1")
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    worker = RewardWorker(
        RunHandle(run_id="run-1", identity="run-1", directory=run.url, config=config, store_incarnation="")
    )
    with pytest.raises(RunError, match=rf"{path} is not the model that run run-1 was given"):
        worker.start()


def test_a_model_of_the_hub_is_not_recorded(linked: RunConfig) -> None:
    run = RunDirectory.create(linked, "run-1")
    hub = linked.replace(model={"path": "org/name"}, distillation=None)
    record_inputs(run, hub)
    assert json.loads((run.path / "inputs.json").read_text())["models"] == {}
    check_files(run, hub)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
@pytest.mark.parametrize("at", [0, 2**20, 3 * 2**20 - 1])
def test_the_digest_of_a_model_has_both_ends_and_parts_of_each_file(tmp_path: Path, name: str, at: int) -> None:
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"):
        (tmp_path / file).write_bytes(bytes(3 * 2**20))
    before = weights_digest(str(tmp_path))
    content = bytearray((tmp_path / name).read_bytes())
    content[at : at + 2**18] = b"x" * len(content[at : at + 2**18])
    (tmp_path / name).write_bytes(content)
    assert "" != weights_digest(str(tmp_path)) != before


def test_other_held_out_prompts_are_recorded_when_they_are_given(tmp_path: Path, config: RunConfig) -> None:
    run, path = find_or_create_run(config, "run-1"), make_tiny_data(tmp_path / "more.jsonl", 5)
    config = config.replace(data=config.data.replace(eval_path=str(path)))
    renew_inputs(run, config)
    make_tiny_data(path, 6)
    with pytest.raises(RunError, match=r"the data of .*more\.jsonl is not"):
        check_files(run, config)


def test_a_changed_module_is_a_warning_once(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run = find_or_create_run(config, "run-1")
    renew_inputs(run, config)
    assert not caplog.records
    (tmp_path / "own" / "rewards" / "sums.py").write_text(REWARD.replace("1.0", "0.5"))
    renew_inputs(run, config)
    assert "the module own.rewards.sums has changed since run run-1 was given it" in caplog.text
    caplog.clear()
    renew_inputs(run, config)
    assert not caplog.records


def test_a_run_without_a_record_goes_on_as_before(tmp_path: Path, config: RunConfig) -> None:
    run = RunDirectory.create(config, "run-1")
    make_tiny_data(tmp_path / "train.parquet", 4)
    renew_inputs(run, config)
    assert not (run.path / "inputs.json").exists()
    (run.path / "inputs.json").write_text("{")
    with pytest.raises(RunError, match=r"run-1/inputs\.json is damaged"):
        check_files(run, config)


def test_a_rollout_worker_that_is_created_again_checks_the_data(tmp_path: Path, config: RunConfig) -> None:
    run = find_or_create_run(config, "run-1")
    handle = RunHandle(run_id="run-1", identity="run-1", directory=run.url, config=config, store_incarnation="")
    make_tiny_data(tmp_path / "train.parquet", 4)
    with pytest.raises(RunError, match=r"the data of .*train\.parquet is not"):
        RolloutWorker(handle).start()


def test_the_digest_is_that_of_all_files(tmp_path: Path) -> None:
    for number in range(2):
        make_tiny_data(tmp_path / f"train-{number}.jsonl", 2 + number)
    found = {data_digest(str(tmp_path / name)) for name in ("train-*.jsonl", "train-0.jsonl", "train-1.jsonl")}
    assert len(found) == 3
    assert data_digest(str(tmp_path)) in found


def test_prompts_have_the_date_of_the_runs_first_day(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Day(datetime.date):
        number = 1

        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2026, 1, cls.number)

    monkeypatch.setattr(infra.workers.inputs, "date", Day)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    config = find_or_create_run(config, "run-1").config()
    assert config.data.chat_template_kwargs == {"strftime_now": "2026-01-01"}
    Day.number = 2
    asked = config.replace(data=config.data.replace(chat_template_kwargs={}), steps=9)  # by whom retries the flow run
    config = resumed_config(find_or_create_run(asked, "run-1"), asked)
    assert (config.steps, config.data.chat_template_kwargs) == (9, {"strftime_now": "2026-01-01"})
    tokenizer = load_tokenizer(config.model)
    prompts, _ = load_run_prompts(config, tokenizer)
    assert tokenizer.decode(prompts[0].prompt_ids).startswith("01 Jan 2026<|user|>")
    assert find_or_create_run(asked, "run-2").config().data.chat_template_kwargs == {"strftime_now": "2026-01-02"}
    other = config.replace(data=config.data.replace(chat_template_kwargs={"strftime_now": "2025-05-05"}))
    assert find_or_create_run(other, "run-3").config() == other


def test_a_reward_model_has_the_date_of_the_runs_first_day(tmp_path: Path, config: RunConfig) -> None:
    path = make_tiny_reward_model(tmp_path / "liked")
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + template)
    model = ModelReward(path=str(path), max_tokens=100)
    for reward in (model, WeightedReward.model_validate({"parts": {"liked": {"reward": model}}})):
        asked = config.replace(reward=reward)
        run = find_or_create_run(asked, f"run-{reward.kind}")
        dated = run.config()
        assert dated.data.chat_template_kwargs == {"strftime_now": datetime.date.today().isoformat()}
        assert resumed_config(run, asked) == dated
        load_run_prompts(dated, load_tokenizer(dated.model))  # by the policy's template, which has no date
    by_hand = {year: dated.replace(data=dated.data.with_date(f"{year}-05-05")) for year in (2025, 2026)}
    assert find_or_create_run(by_hand[2025], "run-by-hand").config() == by_hand[2025]
    scores = {year: scores_of(config) for year, config in by_hand.items()}
    assert scores_of(by_hand[2025]) == scores[2025] != scores[2026]
    with closing(open_reward_scorer(model, partial(open_model_here, date="2025-05-05"))) as scorer:
        here = scorer.score([RewardItem("1 + 1 =", each, "2", {}) for each in COMPLETIONS], groups=[0] * 2)
    assert tuple(here) == scores[2025]  # as `sluice replay` scores


def scores_of(config: RunConfig) -> tuple[RewardOutcome, ...]:
    """Return what a run's reward worker makes of two responses."""
    worker = RewardWorker(RunHandle(run_id="run", identity="run", directory="", config=config, store_incarnation=""))
    worker.start()
    return worker.score(RewardItem("1 + 1 =", COMPLETIONS, "2", {})).group


def test_the_record_has_paths_and_modules(config: RunConfig) -> None:
    run = find_or_create_run(config, "run-1")
    record = json.loads((run.path / "inputs.json").read_text())
    model = {"folder": config.model.path, "weights": weights_digest(config.model.path)}
    assert record["models"] == {config.model.path: model}
    assert list(record["data"]) == [config.data.train_path, config.data.eval_path]
    assert list(record["code"]) == ["own.rewards.sums"]
