"""Cancelling and suspending a run from the Prefect UI, and terminating its process.

Prefect only writes the request to the flow run's state. For the runs of deployments the worker or `sluice serve` reads
it and terminates the run's process, but only once for each flow run. So every run reads it itself, too: one that was
started in a terminal, and one that is cancelled again after a retry. Of a suspension Prefect tells a run by an event,
which a busy machine may lose; then the run would go on for hours. So every run reads that itself, too.

A SIGTERM is turned into an exception by Prefect, which is raised wherever the main thread is. In a callback of the
event loop, or in code that catches everything, that is where it ends, and the run would go on. So every run has the
event loop tell it of the signal, too. While it trains, only that: the exception would also cancel the calls of ranks
that are about to end, after which they must be killed, and nothing is left to save.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Running, Suspended

from infra.storage.driver_lock import finish_in_thread

Result = TypeVar("Result")
Event = TypeVar("Event")
POLL_SECONDS = 2.0
Tell = Callable[[], object]
_told: ContextVar[Tell | None] = ContextVar("told", default=None)  # of a SIGTERM
_all_told: dict[Tell, Tell | None] = {}  # each with the one that it is within
_handlers: list[Any] = []  # of SIGTERM, one from before each block of `sigterm_only_told`


class Notice:
    """A SIGTERM to a run's process, or the drain of a node that it uses, and the time until that may be gone.

    Args:
        seconds: From the notice on: half of them for what the run has in hand, the rest to save a checkpoint. Of two,
            a drain and a SIGTERM, they are counted from the first.

    Attributes:
        reason: What was given notice of.
        then: What the run does after the checkpoint.
    """

    reason, then = "SIGTERM", "the run can be resumed"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._given_at: float | None = None
        self._share = 0.5  # of the seconds, for what is in hand
        self._given = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()

    @property
    def is_given(self) -> bool:
        """Whether it has arrived."""
        return self._given_at is not None

    @property
    def seconds_passed(self) -> float:
        """Seconds since then."""
        return 0.0 if self._given_at is None else time.monotonic() - self._given_at

    @property
    def seconds_left(self) -> float:
        """Seconds until the process or the node may be gone."""
        return max(0.0, self._seconds - self.seconds_passed)

    def hold(self, share: float = 0.5) -> None:
        """Have a notice wait for the end of the surrounding `released`: what is in hand is better finished.

        Args:
            share: Of the seconds, how long; all of them for a checkpoint, as nothing is left to do after it.
        """
        if not self.is_given:
            self._share = share
            self._free.clear()

    @contextmanager
    def released(self) -> Iterator[None]:
        """End, with the block, what `hold` has begun in it."""
        try:
            yield
        finally:
            self._free.set()

    @contextmanager
    def held(self, share: float = 0.5) -> Iterator[None]:
        """Have a notice wait for the end of the block; see `hold`."""
        with self.released():
            self.hold(share)
            yield

    async def wait_unless_given(self, task: asyncio.Task[Any]) -> None:
        """Wait until a task that may also be done later has ended; a notice cancels it."""
        given = asyncio.ensure_future(self._given.wait())
        try:
            await asyncio.wait({task, given}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        finally:
            given.cancel()

    async def give(self, reason: str = reason, then: str = then) -> None:
        """Begin to count the seconds; return when the run has nothing in hand, or what it may take of them is over."""
        self.reason, self.then = reason, then
        self._given_at = self._given_at or time.monotonic()
        self._given.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._free.wait(), max(0.0, self._seconds * self._share - self.seconds_passed))

    def withdraw(self) -> None:
        """Forget it: the run goes on without what may be gone."""
        self._given_at = None
        self._given.clear()


async def rename_flow_run(name: str) -> None:
    """Give the current flow run a name."""
    async with get_client() as client:
        await client.update_flow_run(UUID(flow_run.id), name=name)


async def set_state(state: State) -> None:
    """Give the current flow run a state."""
    async with get_client() as client:
        await client.set_flow_run_state(UUID(flow_run.id), state, force=True)


async def end_pause() -> None:
    """Have the current flow run be running if it is paused, since Prefect pauses no other; a suspended one stays so."""
    async with get_client() as client:
        state = (await client.read_flow_run(UUID(flow_run.id))).state
        if state is not None and state.is_paused() and state.name != Suspended().name:
            await client.set_flow_run_state(UUID(flow_run.id), Running(), force=True)


async def run_until(event: Coroutine[Any, Any, Event], work: Coroutine[Any, Any, Result]) -> Result | Event:
    """Await `work`; if `event` ends first, cancel `work`, await its clean-up, and return or raise what `event` does."""
    running, watching = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else watching.result()
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Await the end of `work`, which is bounded, in a task that was cancelled: cancelling it again has no effect."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return task.result()


async def run_in_thread(what: str, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread; if this is cancelled, say that `what` goes on, and await its end before anything else."""
    warning = "waiting for the end of %s; kill -9 %d ends it at once"
    return await finish_in_thread(work, lambda: get_run_logger().warning(warning, what, os.getpid()))


async def cancellable(work: Coroutine[Any, Any, Result]) -> Result | State:
    """Await `work`; if the flow run is cancelled in the UI, cancel it, await its clean-up, and return `Cancelled`.

    Raises:
        Pause: The flow run was suspended; `work` was cancelled, and has cleaned up.
        TerminationSignal: The process was terminated; the same.
    """
    try:
        return await run_until(_end_requested(), terminable(work))
    except TerminationSignal:  # of a worker that has seen the request first: reported as a crash, it would be resumed
        with suppress(TimeoutError):
            async with get_client() as client:
                if (state := await asyncio.wait_for(_find_end(client), POLL_SECONDS)) is not None:
                    return state
        raise


async def terminable(work: Coroutine[Any, Any, Result], notice: Notice | None = None) -> Result:
    """Await `work`; if the process is terminated, cancel it, and await its clean-up, wherever the exception of it ends.

    Args:
        work: What is awaited.
        notice: Is given the signal first, and decides when `work` is cancelled; None: at once.

    Raises:
        TerminationSignal: The process was terminated.
    """
    loop = asyncio.get_running_loop()
    requested, before = asyncio.Event(), loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), TerminationSignal):
            (before or asyncio.AbstractEventLoop.default_exception_handler)(loop, context)

    async def terminated() -> Result:
        await requested.wait()
        if notice is not None:
            await notice.give()
        raise TerminationSignal(signal.SIGTERM)

    loop.set_exception_handler(handle)
    try:
        with _told_of_sigterm(loop, requested.set):
            return await run_until(terminated(), work)
    finally:
        loop.set_exception_handler(before)


@contextmanager
def _told_of_sigterm(loop: asyncio.AbstractEventLoop, tell: Tell) -> Iterator[None]:
    """Have the event loop call `tell` after a SIGTERM, next to the handler of the signal, whichever that is by then.

    Of several within one another the innermost is told; of tasks at the same time, such as runs of a sweep, that of
    each. Signals reach only the main thread; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _all_told[tell], token = _told.get(), _told.set(tell)
    with _same_handler():
        loop.add_signal_handler(signal.SIGTERM, _tell_innermost)
    try:
        yield
    finally:
        _told.reset(token)
        del _all_told[tell]
        if not _all_told:
            with _same_handler():
                loop.remove_signal_handler(signal.SIGTERM)


def _tell_innermost() -> None:
    for tell in _all_told.keys() - _all_told.values():
        tell()


@contextmanager
def sigterm_only_told() -> Iterator[None]:
    """Have a SIGTERM raise nothing during the block, which is within `terminable`: its event loop is told.

    Prefect installs its handler again for each subflow, so each needs a block of its own. The handler of before comes
    back after the last of the blocks that are open at the same time, such as those of a sweep's runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _handlers.append(signal.signal(signal.SIGTERM, lambda *_: None))
    try:
        yield
    finally:
        before = _handlers.pop()
        if not _handlers:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _same_handler() -> Iterator[None]:
    """Put the handler of SIGTERM back: asyncio's would take Prefect's place."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


async def _end_requested() -> State:
    """Wait until `_find_end` finds something."""
    async with get_client() as client:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if (state := await _find_end(client)) is not None:
                return state


async def _find_end(client: PrefectClient) -> State | None:
    """Return `Cancelled` if somebody has cancelled the flow run; raise `Pause` if it was suspended."""
    try:
        state = (await client.read_flow_run(UUID(flow_run.id))).state
    except (httpx.HTTPError, PrefectException, ValueError):  # it is gone, or what answers for it is no server
        return None
    if state is not None and state.is_cancelling():
        return Cancelled(message="cancelled in the Prefect UI; the run can be resumed")
    if state is not None and state.is_paused() and state.name == Suspended().name:
        raise Pause(state=state)
    return None
