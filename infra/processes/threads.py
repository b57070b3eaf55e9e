"""Threads for the plain code of users' calls, in their process.

Needs the standard library only, like `infra.environments.child`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from infra.processes.calls import Call

MAX_RUNNING = 32  # threads at once; those that nobody waits for any more don't count


class Work(Future[Any]):
    """What one thread runs.

    Args:
        function: What is run.
        call: The call that waits for it, if any.
        abandon: Called if it is canceled while it runs, which a thread can't be.
    """

    def __init__(self, function: Callable[[], Any], call: Call | None, abandon: "Callable[[Work], None]") -> None:
        super().__init__()
        self.function, self.call, self._abandon = function, call, abandon
        self.is_abandoned = False

    def cancel(self) -> bool:
        """Return whether it will not run; one that runs already is abandoned."""
        is_canceled = super().cancel()
        if not is_canceled and self.running() and not self.is_abandoned:
            self.is_abandoned = True
            self._abandon(self)
        return is_canceled

    def count(self, *, waiting: int = 0, running: int = 0) -> None:
        """Tell the call, whose clock stands still while it waits for threads only."""
        if self.call is not None:
            self.call.count_threads(waiting=waiting, running=running)


class ThreadPerCall(ThreadPoolExecutor):
    """Runs each piece of work in a thread of its own: one that hangs keeps no other from running.

    It is an event loop's default executor, and used in the loop's thread. A thread that hangs ends with its process.

    Attributes:
        num_hung: Threads that nobody waits for any more, and that still run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(max_workers=1)  # whose thread is never started
        self._loop, self._queue = loop, deque[Work]()
        self._num_running, self.num_hung = 0, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Work:
        """Begin to run a function, or have it wait until fewer than `MAX_RUNNING` others run."""
        work = Work(partial(fn, *args, **kwargs), Call.current.get(None), self._abandon)
        work.count(waiting=1)
        self._queue.append(work)
        self._start_waiting()
        return work

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the threads, which end with the process."""

    def _start_waiting(self) -> None:
        while self._queue and self._num_running < MAX_RUNNING:
            work = self._queue.popleft()
            work.count(waiting=-1)
            if not work.set_running_or_notify_cancel():
                continue
            self._num_running += 1
            work.count(running=1)
            try:
                threading.Thread(target=self._run, args=(work,), daemon=True).start()
            except RuntimeError as error:  # the system has no more threads
                work.set_exception(error)
                self._loop.call_soon(self._end, work)

    def _run(self, work: Work) -> None:
        """Run a piece of work, in its thread."""
        try:
            result = work.function()
        except BaseException as error:  # noqa: BLE001 - as in a thread of `ThreadPoolExecutor`
            work.set_exception(error)
        else:
            work.set_result(result)
        self._loop.call_soon_threadsafe(self._end, work)

    def _abandon(self, work: Work) -> None:
        self.num_hung += 1
        self._free(work)

    def _end(self, work: Work) -> None:
        if work.is_abandoned:
            self.num_hung -= 1
        else:
            self._free(work)

    def _free(self, work: Work) -> None:
        self._num_running -= 1
        work.count(running=-1)
        self._loop.call_soon(self._start_waiting)  # after what is canceled together with this work
