"""What `sluice serve` and `sluice deploy` refuse before anything is started, and the decisions and events of a run."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from prefect.events import Event
from prefect.logging import disable_run_logger

from flows.lifecycle.cancellation import Notice
from flows.train import _training_loop
from flows.ui.approval import find_failed_queries
from flows.ui.events import COLLAPSE_FRACTION, WINDOW_STEPS, RewardCollapsed, RunEvents, RunStarted, StepCompleted
from flows.ui.reporter import RunReporter
from infra.monitors import Monitors
from infra.storage.folder import Folder
from infra.storage.lineage import Fork, save_fork
from infra.storage.run_files import Decision, DecisionsFile
from infra.storage.runs import RunDirectory
from schemas.config.load import load_config
from schemas.config.runtime import ApprovalConfig, MetricLimit
from schemas.errors import ConfigError
from schemas.step import FailedQuery, PolicyHandle, RunHandle, StepReport
from tests.support.command import assert_rejected, make_command
from tests.support.configs import config_toml
from tests.support.small_run import make_small_run


@pytest.fixture
def sluice(monkeypatch, capsys, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(config_toml())
    return make_command(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("tiny.toml", "--cron", "every night"), ("--cron 'every night' can't be parsed", "'0 2 * * *'")),
        (("tiny.toml", "--cron", "0 2 * * *", "--timezone", "Mars"), ("--timezone 'Mars'", "Europe/Berlin")),
        (("tiny.toml", "other/tiny.toml"), ("two configs are named 'tiny'",)),
        (("absent.toml",), ("config file absent.toml does not exist",)),
        (("tiny.toml", "--set", "steps=0"), ("steps = 0",)),
        (("tiny.toml", "--set", "approval.when=['kl too high']"), ("approval.when", "METRIC > NUMBER")),
        (("tiny.toml", "--set", "approval.when=['klm > 1']"), ("approval.when", "klm")),
    ],
)
def test_serve_refuses_bad_input(sluice, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    assert_rejected(sluice("serve", *arguments), *parts)
    assert not Path(".sluice").exists()


def test_a_limit_survives_the_round_trip_through_a_config(sluice) -> None:  # type: ignore[no-untyped-def]
    config = load_config(Path("tiny.toml"), ["approval.when=['kl > 0.2', 'reward < 0.1']"])
    again = type(config).model_validate_json(config.model_dump_json())
    assert [str(limit) for limit in again.approval.when] == ["kl > 0.2", "reward < 0.1"]
    assert again == config
    with pytest.raises(ConfigError, match=r"approval\.when"):
        load_config(Path("tiny.toml"), ["approval.when=['kl > high']"])


def test_a_limit_is_exceeded_on_its_side_only() -> None:
    above, below = (MetricLimit.model_validate(text) for text in ("kl > 0.2", "reward < 0.1"))
    assert [above.is_exceeded({"kl": kl}) for kl in (0.1, 0.2, 0.3)] == [False, False, True]
    assert [below.is_exceeded({"reward": reward}) for reward in (0.0, 0.1, 0.2)] == [True, False, False]


def test_decisions_change_the_learning_rate_of_later_steps_only(tmp_path: Path) -> None:
    decisions = DecisionsFile(Folder(str(tmp_path), {}))
    assert decisions.lr_scale(9) == 1
    for step, factor in ((2, 0.5), (5, 0.25), (7, 1.0)):
        decisions.add(Decision(step=step, reason="kl > 0.2", lr_factor=factor))
    assert [decisions.lr_scale(step) for step in range(9)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.125, 0.125, 0.125]


def test_saved_queries_are_checked_with_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(config_toml())
    config = load_config(Path("tiny.toml"), ["approval.queries=queries", "approval.on_failed_queries=true"])
    assert config.approval.on_failed_queries
    for overrides, message in (
        (["approval.queries=queries", "store.kind=shared"], "approval.queries reads columns from files"),
        (["approval.on_failed_queries=true"], "needs approval.queries"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(Path("tiny.toml"), overrides)


def test_queries_of_a_step_are_answered_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_small_run(tmp_path)
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / "long.sql").write_text("select row from rows where step = $step and row > 3")
    config = directory.config()
    asked = config.replace(approval=ApprovalConfig(queries=str(tmp_path / "queries")))
    run = RunHandle(run_id="demo", identity="demo", directory=directory.url, config=asked, store_incarnation="a")
    assert asyncio.run(find_failed_queries(run, 3)) == (FailedQuery(name="long", num_rows=1, rows=('{"row": 4}',)),)
    assert asyncio.run(find_failed_queries(run.replace(config=config), 3)) == ()
    monkeypatch.setattr("infra.history.sql.CHECK_STEPS", 1)
    (tmp_path / "queries" / "long.sql").write_text("select distinct step from rows")
    assert asyncio.run(find_failed_queries(run, 3))[0].rows == ('{"step": 3}',)
    (tmp_path / "queries" / "long.sql").unlink()
    (failed,) = asyncio.run(find_failed_queries(run, 3))
    assert "has no file that ends in .sql" in str(failed.error)


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What is emitted."""
    found: list[Event] = []

    def emit(event: str, resource: dict[str, str], payload: dict[str, object], follows: Event | None) -> Event:
        leader = follows.id if follows else None
        found.append(Event(event=event, resource=resource, payload=payload, follows=leader))
        return found[-1]

    monkeypatch.setattr("flows.ui.events.emit_event", emit)
    return found


def report_of(step: int, reward: float) -> StepReport:
    metrics = {"reward": reward, "tokens": 8.0}
    return StepReport(step=step, policy_version=step + 1, metrics=metrics, seconds=1.0, seconds_by_phase={})


def collapse(events: RunEvents, rewards: tuple[float, float] = (0.8, 0.0)) -> None:
    """Report a run whose reward collapses after `WINDOW_STEPS` steps, and which then ends."""
    events.start(0)
    for step, reward in enumerate(reward for reward in rewards for _ in range(WINDOW_STEPS)):
        events.complete_step(report_of(step, reward))
        events.save_checkpoint(step + 1)
    events.end(2 * WINDOW_STEPS, is_complete=True)


def test_a_collapse_of_the_reward_is_reported_once(emitted: list[Event]) -> None:
    collapse(RunEvents("run", "runs"))
    # The mean over the window falls by a tenth of 0.8 with each step: after six, it is below half.
    collapsed = [event.payload["step"] for event in emitted if event.event == RewardCollapsed.event]
    assert collapsed == [WINDOW_STEPS + int(WINDOW_STEPS * COLLAPSE_FRACTION) + 1]

    emitted.clear()
    collapse(RunEvents("run", "runs"), rewards=(-0.2, -0.9))  # which has no half
    assert RewardCollapsed.event not in {event.event for event in emitted}

    emitted.clear()
    collapse(RunEvents("run", "runs", num_reported=collapsed[0]))  # resumed: the steps up to the collapse are repeated
    assert RewardCollapsed.event not in {event.event for event in emitted}


class Ended(Exception):
    """Ends a driver in a test."""


@pytest.mark.parametrize(
    ("num_done", "of_parent", "collapsed"),
    [
        (15, 0, [(21, 0.8)]),  # of ten steps, the sixth with 0.1 brings the mean below half
        (25, 0, []),  # it was reported before
        (15, 15, []),  # in a fork, whose reward may be another function
    ],
)
def test_a_resumed_run_knows_the_best_reward_of_its_own_steps(
    tmp_path: Path,
    emitted: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    num_done: int,
    of_parent: int,
    collapsed: list[tuple[int, float]],
) -> None:
    reports = [report_of(step, 0.8 if step < 15 else 0.1) for step in range(35)]

    async def start_workers(run: RunHandle) -> None:
        """Start none."""

    async def reconcile(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
        return PolicyHandle(run_id="demo", version=num_done, incarnation="")

    async def end(*_: object) -> None:
        raise Ended

    monkeypatch.setattr("flows.train._start_workers", start_workers)
    monkeypatch.setattr("flows.train.reconcile", reconcile)
    monkeypatch.setattr("flows.train.record_event", lambda *_: None)
    monkeypatch.setattr("flows.train.ProgressArtifact.create", end)
    directory = make_small_run(tmp_path)
    if of_parent:
        save_fork(directory, Fork(parent="elsewhere", run_id="other", step=of_parent, changes={}))
    for report in reports[:num_done]:
        directory.metrics.append_step(report)
    config = directory.config()
    run = RunHandle(run_id="demo", identity="demo", directory=directory.url, config=config, store_incarnation="a")
    events = RunEvents("demo", directory.runs_dir, num_reported=num_done)
    with disable_run_logger(), pytest.raises(Ended):
        asyncio.run(_training_loop(run, directory, Monitors("demo", []), events, Notice(1)))
    for report in reports[num_done:]:
        events.complete_step(report)
    found = [event.payload for event in emitted if event.event == RewardCollapsed.event]
    assert [(payload["step"], round(payload["best_reward"], 6)) for payload in found] == collapsed


def test_a_checkpoint_is_reported_once_by_all_drivers(
    tmp_path: Path, emitted: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, materialized = make_small_run(tmp_path), []

    class Described:
        """Stands for the Prefect task."""

        @staticmethod
        def materializing(*_: object) -> Callable[..., Coroutine[Any, Any, None]]:
            async def describe(run: RunHandle, version: int, evals: object) -> None:
                materialized.append(version)

            return describe

    monkeypatch.setattr("flows.ui.reporter.describe_checkpoint", Described)
    config = directory.config()
    run = RunHandle(run_id="demo", identity="demo", directory=directory.url, config=config, store_incarnation="a")
    for versions in ((1, 2), (2, 2, 3), (3,)):  # of three drivers: a resumed one finds the newest version again
        events = RunEvents("demo", directory.runs_dir, checkpoint=directory.reported_checkpoint())
        reporter = RunReporter(run, None, Monitors("demo", []), events, directory.metrics)  # type: ignore[arg-type]
        for version in versions:
            asyncio.run(reporter.checkpoint(version, []))
    assert [event.payload["step"] for event in emitted] == materialized == [1, 2, 3]


def test_a_lost_event_delays_no_later_step(emitted: list[Event]) -> None:
    collapse(RunEvents("run", "runs"))
    leader = None
    for event in emitted:
        if event.event in (RunStarted.event, StepCompleted.event):
            assert event.follows is None
            leader = event.id
        else:
            assert event.follows == leader


def test_a_limit_on_a_metric_that_the_first_step_lacks_is_warned_of(
    tmp_path: Path, emitted: list[Event], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Progress:
        """Stands for the artifact in Prefect."""

        async def show_step(self, report: StepReport) -> None:
            """Show nothing."""

    monkeypatch.setattr("flows.ui.reporter.get_run_logger", logging.getLogger)
    directory = make_small_run(tmp_path)
    when = tuple(map(MetricLimit.model_validate, ("kl > 0.2", "reward < 0.1", "step/seconds > 9")))
    config = directory.config().replace(approval=ApprovalConfig(when=when))
    run = RunHandle(run_id="demo", identity="demo", directory=directory.url, config=config, store_incarnation="a")
    events = RunEvents("demo", directory.runs_dir)
    reporter = RunReporter(run, Progress(), Monitors("demo", []), events, directory.metrics)  # type: ignore[arg-type]
    for step in (6, 7):
        asyncio.run(reporter.step(report_of(step, 0.5)))
    (warned,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned.startswith("approval.when: kl > 0.2: step 7 has no metric kl")
