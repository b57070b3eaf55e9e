"""A run whose nodes are drained: what it saves and what it goes on with, also next to a SIGTERM."""

import asyncio
import logging
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import TerminationSignal
from prefect.utilities.engine import capture_sigterm

import flows.train
from flows.lifecycle.cancellation import Notice, sigterm_only_told, terminable
from flows.ui.events import RunEvents
from infra.monitors import Monitors
from infra.storage.runs import RunDirectory
from schemas.errors import WorkerLostError
from schemas.step import EvalReport, PolicyHandle, RunHandle, StepReport
from tests.support.small_run import make_small_run

STEPS = 3
ADDRESSES = {"node-1": "10.0.0.1", "node-2": "10.0.0.2"}


class Driver:
    """A driver of a run whose workers are played: what has happened, and its drains and checkpoints."""

    def __init__(self, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        config = directory.config()
        config = config.replace(steps=STEPS, runtime=config.runtime.replace(device="cpu"))
        self.directory, self.happened = directory, list[object]()
        self.run = RunHandle(
            run_id="demo", identity="demo", directory=directory.url, config=config, store_incarnation="first"
        )
        self.lost = 0  # how often starts fail
        self.drains: list[asyncio.Event] = []
        for name, played in {
            "get_run_logger": lambda: logging.getLogger("flows"),
            "keep_rows": lambda *_: None,
            "leave_node": lambda node: self.happened.append(f"left {node}"),
            "leave_drained": lambda: self.happened.append("left all that are drained"),
            "kill_workers": lambda *_: self.happened.append("killed"),
            "living_nodes": lambda: ADDRESSES,
            "open_run": lambda *_: self.run,
            "reconcile": self.reconcile,
            "new_step_flow": lambda *_: None,
            "SETTLE_SECONDS": 0,
            "RunReporter": lambda *_: SimpleNamespace(checkpoint=self.report),
            "_start_workers": self.start_workers,
            "SyncClientContext": SimpleNamespace(get_or_create=nullcontext),
            "ProgressArtifact": SimpleNamespace(create=self.reconcile),
        }.items():
            monkeypatch.setattr(flows.train, name, played)

    async def start_workers(self, _: RunHandle) -> None:
        self.happened.append("started")
        self.lost -= 1
        if self.lost >= 0:
            raise WorkerLostError("its node was drained, too")

    async def reconcile(self, *_: object) -> PolicyHandle:
        return PolicyHandle(run_id="demo", version=STEPS, incarnation="new")

    async def report(self, version: int | None, _: object) -> None:
        self.happened.append(f"reported {version}")

    def loop(self, notice: Notice, reason: str = "") -> Any:
        events = RunEvents("demo", self.directory.runs_dir, STEPS)
        return flows.train._training_loop(
            self.run, self.directory, Monitors("demo", []), events, notice, *[reason] * bool(reason)
        )

    async def train_on(self, notice: Notice) -> RunHandle:
        events = RunEvents("demo", self.directory.runs_dir, STEPS)
        return await flows.train._train_on(
            self.run, self.directory, Monitors("demo", []), events, notice, lambda: {*ADDRESSES}
        )


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr("flows.ui.events.emit_event", lambda *_, **__: None)
    directory = make_small_run(tmp_path)
    for step in range(STEPS):
        metrics = {"reward": 0.5, "tokens": 8.0}
        report = StepReport(step=step, policy_version=step + 1, metrics=metrics, seconds=1.0, seconds_by_phase={})
        directory.metrics.append_step(report)
    return Driver(directory, monkeypatch)


async def turns() -> None:
    """Let the event loop do what it can."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("order", ["drain, save, SIGTERM", "drain, SIGTERM, save", "SIGTERM, drain, save"])
def test_a_sigterm_and_a_drain_leave_the_checkpoint_whole_and_the_sigterm_ends_the_run(
    order: str,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    received: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    drained = asyncio.Event()

    async def happen(what: str) -> None:
        drained.set() if what == "drain" else os.kill(os.getpid(), signal.SIGTERM)
        await turns()

    async def wait_for_drain(_: object) -> set[str]:
        await drained.wait()
        return {"node-1"}

    async def save(*_: object) -> int:
        for what in order.split(", save")[1].split(", ")[1:]:
            await happen(what)
        await turns()
        driver.happened.append("saved")
        return STEPS

    async def train(run: RunHandle, *arguments: Any) -> RunHandle:
        notice, policy = arguments[3], await driver.reconcile()
        with sigterm_only_told():
            try:
                with notice.held():  # a step
                    for what in order.split(", save")[0].split(", "):
                        await happen(what)
                await asyncio.Event().wait()
            except BaseException as error:
                await flows.train._save_what_can_be(run, policy, [], error, notice)
                raise
        raise AssertionError

    monkeypatch.setattr(flows.train, "wait_for_drain", wait_for_drain)
    monkeypatch.setattr(flows.train, "save_on_failure", save)
    monkeypatch.setattr(flows.train, "_training_loop", train)

    async def end() -> None:
        notice = Notice(1000)
        with capture_sigterm():
            await terminable(driver.train_on(notice), notice)

    with caplog.at_level(logging.INFO), pytest.raises(TerminationSignal):
        asyncio.run(end())
    assert driver.happened[0] == "saved"
    assert received == [signal.SIGTERM]
    line = caplog.messages[-1]
    assert line.startswith("SIGTERM, ")
    assert line.endswith(f" s ago: the checkpoint after step {STEPS} is complete; the run can be resumed")


def test_of_two_notices_the_first_ones_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("flows.lifecycle.cancellation.time.monotonic", lambda: now[0])

    async def give() -> float:
        notice = Notice(20)
        await notice.give("node 10.0.0.1 is drained", "the run goes on")
        now[0] += 5
        await notice.give()
        return notice.seconds_left

    assert asyncio.run(give()) == 15


def test_all_drained_nodes_are_left_and_the_loop_is_told_why(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = list[str]()

    async def wait_for_drain(_: object) -> set[str]:
        if len(reasons) > 1:
            await asyncio.Event().wait()
        await turns()
        return {*ADDRESSES}

    async def train(run: RunHandle, directory: RunDirectory, *arguments: Any) -> RunHandle:
        reasons.append(arguments[-1])
        if len(reasons) == 1:
            flows.train.record_event(directory, await driver.reconcile(), "cpu")
            await asyncio.Event().wait()
        return run

    monkeypatch.setattr(flows.train, "wait_for_drain", wait_for_drain)
    monkeypatch.setattr(flows.train, "_training_loop", train)
    assert asyncio.run(driver.train_on(Notice(1000))) == driver.run
    assert {*driver.happened[:2]} == {"left node-1", "left node-2"}
    assert driver.happened[2:] == ["killed"]
    assert reasons == ["", "node 10.0.0.1 (node-1) and node 10.0.0.2 (node-2) are drained"]


async def no_evaluation(*_: object) -> None:
    pass


def test_after_a_drain_starts_that_fail_are_repeated_and_history_says_restart(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def save_checkpoint(*_: object, wait: bool) -> int:
        return STEPS

    monkeypatch.setattr(flows.train, "save_checkpoint", save_checkpoint)
    monkeypatch.setattr(flows.train, "_evaluate", no_evaluation)
    driver.lost = 1
    asyncio.run(driver.loop(Notice(1000), "node 10.0.0.1 is drained"))
    # Another node, of which nobody told the run while it had no worker there, is found before each start.
    assert driver.happened == ["left all that are drained", "started"] * 2 + [f"reported {STEPS}"]
    (event,) = driver.directory.metrics.events()
    assert (event.kind, event.step, event.reason) == ("restart", STEPS, "its node was drained, too")


@pytest.mark.parametrize(("lost_in", "is_ended"), [([0, 1, 2], False), ([0, 1, 1], True), ([1, 0], True)])
def test_restarts_count_until_a_further_step_is_done(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, lost_in: list[int], is_ended: bool
) -> None:
    """A worker is lost in these steps, one after the other; after each loss the run goes on with step 0."""
    remaining = [*lost_in]

    async def begin(*_: object) -> PolicyHandle:
        return PolicyHandle(run_id="demo", version=0, incarnation="new")

    async def step(run: RunHandle, policy: PolicyHandle) -> StepReport:
        if remaining[:1] == [policy.step]:
            raise WorkerLostError(f"lost in step {remaining.pop(0)}")
        metrics = {"reward": 0.5, "tokens": 8.0}
        return StepReport(
            step=policy.step, policy_version=policy.step + 1, metrics=metrics, seconds=1.0, seconds_by_phase={}
        )

    async def nothing(*_: object, wait: bool = False) -> int:
        return STEPS

    for name, played in {
        "reconcile": begin,
        "new_step_flow": lambda *_: step,
        "_evaluate": nothing,
        "_review": nothing,
        "save_checkpoint": nothing,
        "save_on_failure": nothing,
        "RunReporter": lambda *_: SimpleNamespace(checkpoint=nothing, step=nothing),
    }.items():
        monkeypatch.setattr(flows.train, name, played)
    config = driver.run.config
    driver.run = driver.run.replace(config=config.replace(runtime=config.runtime.replace(max_restarts=1)))
    with pytest.raises(WorkerLostError, match=f"lost in step {lost_in[-1]}") if is_ended else nullcontext():
        asyncio.run(driver.loop(Notice(1000)))
    assert driver.happened.count("started") == len(lost_in) + (not is_ended)
    assert not remaining


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_run_that_is_drained_when_all_is_saved_starts_no_workers(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_evaluated: bool
) -> None:
    manifest = Path(driver.directory.checkpoints) / f"step-{STEPS:06d}" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    monkeypatch.setattr(flows.train, "_wants_evaluation", lambda *_: not is_evaluated)
    monkeypatch.setattr(flows.train, "_evaluate", no_evaluation)

    async def save_checkpoint(*_: object, wait: bool) -> int:
        return STEPS

    monkeypatch.setattr(flows.train, "save_checkpoint", save_checkpoint)
    assert asyncio.run(driver.loop(Notice(1000), "node 10.0.0.1 is drained")) == driver.run
    started = [] if is_evaluated else ["left all that are drained", "started"]
    assert driver.happened == [*started, f"reported {STEPS}"]


@pytest.mark.parametrize("is_sft", [True, False])
def test_a_notice_waits_for_the_last_checkpoint_and_for_evaluations_by_the_ranks(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_sft: bool
) -> None:
    waits, notice = dict[str, bool](), Notice(1000)

    async def is_waited_for() -> bool:
        given = asyncio.ensure_future(notice.give())
        await turns()
        waits = not given.done()
        given.cancel()
        notice.withdraw()
        return waits

    async def evaluate(_run: RunHandle, _policy: PolicyHandle, _evals: list[EvalReport], *_: object) -> None:
        waits["evaluation"] = await is_waited_for()

    async def save_checkpoint(*_: object, wait: bool) -> int:
        waits["checkpoint"] = await is_waited_for()
        return STEPS

    if is_sft:
        config = driver.run.config.model_copy(update={"sft": True})
        driver.run = driver.run.model_copy(update={"config": config})
        monkeypatch.setattr(flows.train, "evaluation_digest", lambda _: "")
    monkeypatch.setattr(flows.train, "_evaluate", evaluate)
    monkeypatch.setattr(flows.train, "save_checkpoint", save_checkpoint)
    asyncio.run(driver.loop(notice))
    assert waits == {"evaluation": is_sft, "checkpoint": True}


def test_a_checkpoint_may_take_all_seconds_of_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()

    async def wait_for(waiting: Any, limit: float) -> None:
        waiting.close()
        limits.append(limit)

    monkeypatch.setattr("flows.lifecycle.cancellation.time.monotonic", lambda: 7.0)
    monkeypatch.setattr("flows.lifecycle.cancellation.asyncio.wait_for", wait_for)

    async def give(share: float) -> None:
        notice = Notice(20)
        with notice.held(share):
            await notice.give()

    for share in (0.5, 1):
        asyncio.run(give(share))
    assert limits == [10, 20]
