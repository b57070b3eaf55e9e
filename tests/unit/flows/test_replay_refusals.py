"""What `sluice replay` and `sluice fork` refuse, on one line, before anything is started or made."""

from pathlib import Path

import pytest

from flows.replay.fork import make_fork, plan_fork
from infra.checkpoints import open_checkpoints
from infra.storage.runs import RunDirectory
from infra.workers.inputs import record_inputs
from schemas.config.load import override_config
from schemas.errors import RunError
from schemas.step import StepReport
from tests.support.checkpoint_tensors import save
from tests.support.command import Command, assert_rejected, make_command
from tests.support.configs import run_config
from tests.support.small_run import make_small_run
from tests.support.tiny import make_tiny_data, make_tiny_model


@pytest.fixture
def sluice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Commands in a folder with a run of four steps, which keeps the columns of the last two."""
    monkeypatch.chdir(tmp_path)
    run = make_small_run()
    for step in range(4):
        report = StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={})
        run.metrics.append_step(report)
    return make_command(monkeypatch, capsys)


def test_steps_that_cannot_be_replayed(sluice: Command) -> None:
    assert_rejected(sluice("replay", "demo", "--steps", "3:2"), "--steps 3:2 is neither a step")
    assert_rejected(sluice("replay", "demo", "--steps", "1:3"), "doesn't keep the columns of step 1", "2 to 3")
    assert_rejected(sluice("replay", "demo", "--steps", "3:5"), "step 4 of run demo is not finished")
    assert_rejected(
        sluice("replay", "demo", "--steps", "3"), "version 3 of run demo can't be had again", "steps 0 to 1"
    )
    report = StepReport(step=0, policy_version=1, metrics={}, seconds=1.0, seconds_by_phase={})
    make_small_run(run_id="shared", kind="shared", keep_steps=0).metrics.append_step(report)
    assert_rejected(sluice("replay", "shared", "--steps", "0"), 'its store.kind = "shared"')


def test_settings_that_would_change_the_rows(sluice: Command) -> None:
    refused = sluice("replay", "demo", "--steps", "2", "seed=1", "rollout.temperature=0.5", "optim.lr=1e-3")
    assert_rejected(refused, "a different rollout.temperature, seed would change", "sluice fork")


def test_forks_that_cannot_be_made(sluice: Command) -> None:
    before = sorted(Path("runs").iterdir())
    fork = ("fork", "demo", "steps=9", "--at")
    assert_rejected(sluice(*fork, "7"), "finished 4 steps, so that it has no version 7 yet")
    assert_rejected(sluice(*fork, "3"), "lacks the columns of steps 0 to 1", "versions that can be: 0;")
    assert_rejected(sluice(*fork, "2", "--run-id", "demo"), "run 'demo' exists")
    assert_rejected(sluice(*fork, "2", "--run-id", "../demo"), "not a safe name")
    assert_rejected(sluice(*fork, "2", "model.path=other"), "model.path can't change")
    assert_rejected(sluice(*fork, "2", "optim.kind=muon"), "has the moments of optim.kind = adamw", "fork after step 0")
    assert_rejected(sluice("fork", "demo", "--at", "4"), "steps = 4 would have nothing left to do", "steps=5")
    stale = ("correction.kind=truncated", "runtime.max_staleness=1")
    assert_rejected(sluice(*fork, "2", *stale), "runtime.max_staleness = 0 and keeps no earlier weights")
    assert_rejected(sluice(*fork, "0", *stale[:1], "runtime.max_staleness=2"), "only runs with 0 or 1 can be forked")
    assert sorted(Path("runs").iterdir()) == before


def test_a_fork_that_was_interrupted_is_begun_anew(sluice: Command) -> None:
    parent = RunDirectory("runs/demo")
    for version in (2, 4):
        save(open_checkpoints(parent, parent.config().checkpoint), version)
    left = RunDirectory("runs/again")
    save(open_checkpoints(left, parent.config().checkpoint), 9)  # newer than what it will begin with
    left.folder.write("metrics.jsonl", b'{"kind": "step", "step": 0}\n')
    make_fork(plan_fork(parent, 2, "again", "a note", ["optim.lr=0.5"]))
    more, fewer = (plan_fork(parent, 2, "x", overrides=[f"rollout.num_prompts={prompts}"]) for prompts in (64, 1))
    assert plan_fork(parent, 2, "x").order_note is None
    num_prompts = parent.config().rollout.num_prompts
    assert f"skips {2 * (64 - num_prompts)} rows of the order" in (more.order_note or "")
    assert f"takes {2 * (num_prompts - 1)} rows once more" in (fewer.order_note or "")
    fork = RunDirectory("runs/again")
    assert open_checkpoints(fork, fork.config().checkpoint).complete_versions() == [2]
    assert [report.step for report in fork.metrics.steps()] == [0, 1]
    assert (fork.config().note, fork.config().optim.lr) == ("a note", 0.5)
    assert not fork.ledger.is_outdated()
    assert_rejected(
        sluice("inspect", "again", "1"), "step 1 of run again has no columns, as run demo", "that have: none"
    )


def test_forks_with_another_curriculum(sluice: Command) -> None:
    run, fork = RunDirectory("runs/demo"), ("fork", "demo", "steps=9", "--at")
    save(open_checkpoints(run, run.config().checkpoint), 2)
    levels = 'data.curriculum={kind="levels",field="level",starts=[1,2,3]}'
    assert_rejected(sluice(*fork, "2", levels), "of another curriculum after its first step, or of none", "step 0")
    plan_fork(run, 0, overrides=[levels])
    sources = [{"path": "train.parquet"}, {"path": "more.jsonl"}]
    curriculum = {"train_path": None, "sources": sources, "curriculum": {"kind": "sources"}}
    config = run.config()
    run.write_config(config.replace(data={**config.data.model_dump(exclude_unset=True), **curriculum}))
    weighted = 'data.sources=[{path="train.parquet",weight=2},{path="more.jsonl"}]'
    plan_fork(run, 2, overrides=["data.curriculum.window=3", weighted])
    plan_fork(run, 2, overrides=["data.curriculum=None"])
    for others in ('{path="more.jsonl"},{path="train.parquet"}', '{path="train.parquet"},{path="a/more.jsonl"}'):
        with pytest.raises(RunError, match="of another curriculum"):
            plan_fork(run, 2, overrides=[f"data.sources=[{others}]"])
    with pytest.raises(RunError, match="of another curriculum"):
        plan_fork(run, 2, overrides=["data.sources=[]", "data.train_path=train.parquet", levels])


def test_another_model_behind_the_same_path(sluice: Command) -> None:
    run = RunDirectory("runs/demo")
    make_tiny_model(Path("model"))
    make_tiny_data(Path("train.parquet"), 4)
    record_inputs(run, run.config())
    save(open_checkpoints(run, run.config().checkpoint), 2)
    plan_fork(run, 2)
    make_tiny_model(Path("model"), seed=1)
    for command in (
        ("fork", "demo", "--at", "2"),
        ("bundle", "demo", "2", "-o", "file"),
        ("replay", "demo", "--steps", "2"),
    ):
        assert_rejected(sluice(*command), "model is not the model that run demo was given")


def test_another_kind_keeps_the_settings_that_it_has(tmp_path: Path) -> None:
    config = run_config(tmp_path, reward={"kind": "function", "path": "a:b", "max_failure_fraction": 0.25})
    other = override_config(config, ["reward.kind=length", "reward.target=9"], "demo")
    assert (other.reward.kind, other.reward.max_failure_fraction) == ("length", 0.25)
