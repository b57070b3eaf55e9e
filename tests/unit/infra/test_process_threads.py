"""Plain code of environments in threads: what hangs holds nothing else up, and waiting costs no call its time."""

import asyncio
import logging
import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from infra.environments.pool import EnvironmentPool
from infra.environments.slot import MAX_HUNG
from infra.processes import calls
from infra.processes.calls import Call, SharedCallState
from infra.processes.threads import MAX_RUNNING, ThreadPerCall
from rl_core.environments.tools import ToolEnvironment
from tests.support.environment_pools import kinds, open_rows, opened, task


@pytest.fixture
def state() -> SharedCallState:
    memory = os.memfd_create("calls")
    os.truncate(memory, SharedCallState.SIZE)
    try:
        return SharedCallState(memory)
    finally:
        os.close(memory)


def test_a_call_that_was_given_up_keeps_no_other_from_running() -> None:
    never = threading.Event()

    async def play() -> list[int]:
        threads = ThreadPerCall(asyncio.get_running_loop())
        asyncio.get_running_loop().set_default_executor(threads)
        counts = []
        for _ in range(2):
            hung = [asyncio.create_task(asyncio.to_thread(never.wait)) for _ in range(MAX_RUNNING + 1)]
            await asyncio.sleep(0)
            for one in hung:
                one.cancel()
            await asyncio.gather(*hung, return_exceptions=True)
            assert await asyncio.to_thread(int, "7") == 7
            counts.append(threads.num_hung)
        never.set()
        while threads.num_hung:
            await asyncio.sleep(0)
        return counts

    assert asyncio.run(play()) == [MAX_RUNNING, 2 * MAX_RUNNING]  # the one more waited, and was never begun


def test_an_error_is_that_of_its_call() -> None:
    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPerCall(asyncio.get_running_loop()))
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "x")
        with pytest.raises(SystemExit):
            await asyncio.to_thread(exit_with, 3)

    asyncio.run(play())


def exit_with(code: int) -> None:
    raise SystemExit(code)


def test_the_clock_of_a_call_stands_still_until_a_thread_begins(
    state: SharedCallState, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now))
    call, ends = Call(state, 0, 10.0), threading.Event()

    async def play() -> None:
        nonlocal now
        threads = ThreadPerCall(asyncio.get_running_loop())
        others = [threads.submit(ends.wait) for _ in range(MAX_RUNNING)]
        now += 1.0
        Call.current.set(call)
        waiting = [threads.submit(int, "7"), threads.submit(ends.wait)]
        now += 100.0
        assert (call.seconds, waiting[0].running()) == (1.0, False)
        ends.set()
        await asyncio.gather(*map(asyncio.wrap_future, [*others, *waiting]))
        now += 2.0
        assert call.seconds == 3.0

    asyncio.run(play())


def test_the_clock_goes_on_while_a_thread_of_the_call_runs(
    state: SharedCallState, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now))
    call = Call(state, 0, 10.0)
    call.count_threads(waiting=2)
    now += 5.0
    call.count_threads(waiting=-1, running=1)
    now += 1.0
    assert call.seconds == 1.0
    call.count_threads(running=-1)
    now += 5.0
    assert call.seconds == 1.0
    call.count_threads(waiting=-1)
    now += 1.0
    assert call.seconds == 2.0


def test_a_thread_that_can_not_be_started_fails_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def play() -> None:
        threads = ThreadPerCall(asyncio.get_running_loop())
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            refused: list[Future[int]] = [threads.submit(int, "7") for _ in range(MAX_RUNNING + 1)]
            while not all(one.done() for one in refused):
                await asyncio.sleep(0)
        assert {str(one.exception()) for one in refused} == {"can't start new thread"}
        assert await asyncio.wrap_future(threads.submit(int, "7")) == 7

    asyncio.run(play())


def hang(pool: EnvironmentPool, num_rows: int) -> None:
    """Have resets hang in threads until their time is over, and then others be answered."""
    pool.end_all()
    assert kinds(open_rows(pool, *["hang"] * num_rows)) == dict.fromkeys(range(num_rows), "timeout")
    for row in (num_rows, num_rows + 1):  # the first one's answer says how many threads hang
        pool.open(row, task(), seed=0)
        pool.wait()


def test_a_process_with_many_hung_threads_is_replaced_once_it_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    with opened("HangingThread", reset_timeout_seconds=0.05) as pool, caplog.at_level(logging.INFO):
        for num_replaced in range(2):
            pids = pool.pids
            hang(pool, MAX_HUNG - 1)
            assert pool.pids == pids
            while pool.pids == pids:  # a call that a busy machine begins too late is over before it hangs
                hang(pool, 1)
            levels = [record.levelno for record in caplog.records if "still run in threads of it" in record.message]
            assert levels == [logging.WARNING, logging.INFO][: num_replaced + 1]


@pytest.mark.parametrize("name", ["HangingGame", "HangingSession"])
def test_environments_that_keep_state_or_are_to_be_closed_are_given_up_between_batches_only(name: str) -> None:
    with opened(name, reset_timeout_seconds=0.05) as pool:
        pids = pool.pids
        hang(pool, MAX_HUNG + 1)
        assert pool.pids == pids
        while pool.pids == pids:  # as above
            hang(pool, 1)


def test_tools_can_be_given_up() -> None:
    assert not ToolEnvironment.keeps_state
    assert not hasattr(ToolEnvironment, "close")
