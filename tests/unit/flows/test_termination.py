"""A SIGTERM ends a run's work, also if the event loop swallows its exception."""

import asyncio
import logging
import math
import os
import signal
import uuid
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling
from prefect.utilities.engine import capture_sigterm

from flows.cli.run import _was_terminated
from flows.lifecycle.cancellation import Notice, cancellable, sigterm_only_told, terminable
from flows.pipeline import _train_all
from flows.pipeline_plan import PlannedRun
from schemas.config.run import RunConfig
from tests.support.stand_in_prefect import answered_by
from tests.support.sweeps import sweep_plan


async def work(cleaned: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        cleaned.append("work")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class ProxyOrServer(BaseHTTPRequestHandler):
    """Answers as a proxy does whose server is gone, and then as a server of which a flow run is cancelled."""

    num_answers = 0
    num_of_proxy = 2

    def do_GET(self) -> None:
        type(self).num_answers += "flow_runs" in self.path
        run = FlowRun(id=uuid.UUID(int=1), flow_id=uuid.uuid4(), state=Cancelling())
        is_proxy = self.num_answers <= self.num_of_proxy
        body = b"<html>starting</html>" if is_proxy else run.model_dump_json().encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_that_is_no_servers_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.UUID(int=1)))
    cleaned = list[str]()
    with answered_by(ProxyOrServer):
        state = asyncio.run(cancellable(work(cleaned)))
    assert isinstance(state, State)
    assert (state.is_cancelled(), cleaned, ProxyOrServer.num_answers) == (True, ["work"], 3)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_termination_by_a_worker_that_cancels_the_run_is_no_crash(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch, received: list[int]
) -> None:
    class Server(ProxyOrServer):
        num_of_proxy = 0 if is_cancelled else 10**9  # then it can't be asked

    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.UUID(int=1)))
    monkeypatch.setattr("flows.lifecycle.cancellation._end_requested", asyncio.Event().wait)  # it has not looked yet
    cleaned = list[str]()

    async def run() -> object:
        with capture_sigterm():
            asyncio.get_running_loop().call_later(0.01, terminate)
            return await cancellable(work(cleaned))

    with answered_by(Server), nullcontext() if is_cancelled else pytest.raises(TerminationSignal):
        state = asyncio.run(run())
        assert isinstance(state, State)
        assert state.is_cancelled()
    assert cleaned == ["work"]


def test_a_termination_that_the_event_loop_swallows_ends_the_work(received: list[int]) -> None:
    cleaned = list[str]()

    async def run() -> None:
        with capture_sigterm():
            asyncio.get_running_loop().call_later(0.01, terminate)  # Prefect's handler raises within this callback
            await terminable(terminable(work(cleaned)))  # as the flow of a deployment runs that of a run

    with pytest.raises(TerminationSignal):
        asyncio.run(run())
    assert cleaned == ["work"]
    assert received == [signal.SIGTERM]


def test_a_termination_that_other_code_catches_ends_the_work(received: list[int]) -> None:
    cleaned = list[str]()

    async def careless() -> None:
        with suppress(BaseException):
            terminate()
        await work(cleaned)

    async def run() -> None:
        with capture_sigterm():
            await terminable(terminable(careless()))

    with pytest.raises(TerminationSignal):
        asyncio.run(run())
    assert cleaned == ["work"]
    assert received == [signal.SIGTERM]


def test_a_termination_after_the_inner_work_ends_the_outer_work(received: list[int]) -> None:
    """As of a deployment's flow, after the run within it."""
    cleaned = list[str]()

    async def outer() -> None:
        await terminable(asyncio.sleep(0))
        with suppress(BaseException):
            terminate()
        await work(cleaned)

    async def run() -> None:
        with capture_sigterm():
            await terminable(outer())

    with pytest.raises(TerminationSignal):
        asyncio.run(run())
    assert cleaned == ["work"]
    assert received == [signal.SIGTERM]


def test_other_exceptions_that_the_event_loop_swallows_are_reported_as_before() -> None:
    reported = list[str]()

    async def run() -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        loop.call_soon(int, "seven")
        result = await terminable(asyncio.sleep(0.01, 7))
        loop.call_soon(int, "eight")
        await asyncio.sleep(0.01)
        return result

    assert asyncio.run(run()) == 7
    assert [message[-7:] for message in reported] == ["'seven'", "'eight'"]


@pytest.mark.parametrize(("seconds", "done"), [(math.inf, ["in hand", "cancelled"]), (0.01, ["cancelled"])])
def test_what_is_in_hand_is_finished_within_half_of_the_notice(
    received: list[int], seconds: float, done: list[str]
) -> None:
    events, left = list[str](), list[float]()

    async def training(notice: Notice) -> None:
        try:
            with sigterm_only_told():
                with notice.released():
                    notice.hold()
                    terminate()
                    await asyncio.sleep(0.1 if math.isinf(seconds) else 1000)
                    events.append("in hand")
                await asyncio.Event().wait()
        finally:
            events.append("cancelled")
            left.append(notice.seconds_left)

    async def run() -> None:
        notice = Notice(seconds)
        with capture_sigterm():
            await terminable(terminable(training(notice), notice))

    with pytest.raises(TerminationSignal):
        asyncio.run(run())
    assert events == done
    assert 0 <= left[0] <= seconds
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("is_first_done", [True, False])
def test_each_run_of_a_sweep_gets_its_notice_and_ends_by_itself(
    received: list[int], is_first_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, handlers, second_begun, flows = list[str](), list[object](), asyncio.Event(), list[asyncio.Task[None]]()

    async def training(notice: Notice, is_first: bool) -> None:
        with sigterm_only_told():
            with notice.released():
                notice.hold()
                if is_first:
                    await second_begun.wait()
                    if is_first_done:
                        return
                second_begun.set()
                if is_first_done:
                    await asyncio.wait(flows[:1])
                if is_first or is_first_done:
                    terminate()
                while not notice.is_given:
                    await asyncio.sleep(0)
                if not is_first:
                    await asyncio.wait(flows[:1])
                    for _ in range(100):  # turns of the loop, in which the other's end would cancel it
                        await asyncio.sleep(0)
                saved.append("first" if is_first else "second")
            await asyncio.Event().wait()

    def of_run(run: PlannedRun, **_: object) -> Callable[[RunConfig, str], Coroutine[None, None, None]]:
        async def train(config: RunConfig, run_id: str) -> None:
            task = asyncio.current_task()
            assert task is not None
            flows.append(task)
            notice = Notice(math.inf)
            with capture_sigterm():
                await terminable(terminable(training(notice, run_id == "run-0"), notice))

        return train

    async def run() -> None:
        with capture_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))
            try:
                await terminable(_train_all(sweep_plan(tmp_path, 2, max_runs=2), "grpo", lambda _, **__: nullcontext()))
            finally:
                handlers.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr("flows.pipeline._train_flow", of_run)
    monkeypatch.setattr("flows.pipeline.get_run_logger", logging.getLogger)
    with pytest.raises(TerminationSignal):
        asyncio.run(run())
    assert saved == ["first", "second"][is_first_done:]
    assert handlers[0] == handlers[1] != signal.SIG_DFL
    assert received == [signal.SIGTERM]


def test_a_notice_that_was_withdrawn_is_given_again() -> None:
    async def drained_then_terminated() -> None:
        notice = Notice(1000)
        await notice.give("node 127.0.0.1 is drained", "the run goes on")
        assert (notice.is_given, notice.reason, notice.then) == (True, "node 127.0.0.1 is drained", "the run goes on")
        notice.withdraw()
        assert (notice.is_given, notice.seconds_left, notice.seconds_passed) == (False, 1000, 0)
        notice.hold()
        given = asyncio.ensure_future(notice.give())
        await asyncio.sleep(0)
        assert (notice.is_given, notice.reason, notice.then) == (True, "SIGTERM", "the run can be resumed")
        assert not given.done()
        with notice.released():
            pass
        await given

    asyncio.run(drained_then_terminated())


def test_work_that_can_be_done_later_is_cancelled_by_a_notice() -> None:
    async def run() -> tuple[bool, int]:
        notice = Notice(1000)
        later, soon = asyncio.create_task(asyncio.sleep(1000)), asyncio.create_task(asyncio.sleep(0, 7))
        await notice.wait_unless_given(soon)
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, notice.give())
        await notice.wait_unless_given(later)
        return later.cancelled(), soon.result()

    assert asyncio.run(run()) == (True, 7)


def test_errors_that_cause_each_other_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not _was_terminated(first)
    second.__cause__, first.__cause__ = None, TerminationSignal(signal.SIGTERM)
    assert _was_terminated(first)
