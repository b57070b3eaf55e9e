"""A SIGTERM ends a run's work, wherever the main thread is when it comes."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from prefect.exceptions import TerminationSignal
from prefect.utilities.engine import capture_sigterm

from flows.cancellation import terminable


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that reach the handler of before the flow, to which Prefect sends a SIGTERM on."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


async def work(cleaned: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        cleaned.append("work")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_termination_that_the_event_loop_swallows_ends_the_work(received: list[int]) -> None:
    cleaned, swallowed = list[str](), list[BaseException | None]()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: swallowed.append(context.get("exception")))
        with capture_sigterm():
            loop.call_later(0.01, terminate)  # Prefect's handler raises within this callback
            await terminable(terminable(work(cleaned)))  # as the flow of a deployment runs that of a run

    with pytest.raises(TerminationSignal):
        asyncio.run(run())
    assert [type(error) for error in swallowed] == [TerminationSignal]
    assert cleaned == ["work"]
    assert received == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1


def test_work_that_ends_by_itself_leaves_the_signals_alone(received: list[int]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))

    async def run() -> int:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGUSR1)
        return await terminable(asyncio.sleep(0.05, 7))

    assert asyncio.run(run()) == 7
    signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_the_work_is_awaited() -> None:
    async def run() -> int:
        return await asyncio.to_thread(asyncio.run, terminable(asyncio.sleep(0, 7)))

    assert asyncio.run(run()) == 7
