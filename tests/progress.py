"""Waiting without a wall clock: a wait fails when nothing makes progress any more, not when it is slow.

A test that allowed a number of seconds would fail on a slow or busy machine. A deadlock shows otherwise: no process of
those that are waited for uses the processor any more, and nothing they write grows.
"""

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Self

import psutil

STILL_SECONDS = 120.0  # without progress: a deadlock
WORK_SECONDS = 1.0  # of CPU time of one process; an idle one uses less in `STILL_SECONDS`


CHECKS = 24  # while nothing moves
SERVICES = (
    "raylet",
    "gcs_server",
    "ray/dashboard",
    "ray.scripts",
    "runtime_env",
    "ray::IDLE",
    "prefect",
    "moto.server",
)


class Deadlock(AssertionError):
    """Nothing that is waited for makes progress any more."""


class Progress:
    """Whether some processes, or what they write, have moved on.

    Args:
        processes: Return the processes that should be working; looked up again each time.
        written: Return a value that changes with what they have written, such as sizes or modification times.
        still_seconds: How long no progress makes a deadlock.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]],
        written: Callable[[], object] = lambda: None,
        still_seconds: float = STILL_SECONDS,
    ) -> None:
        self._processes, self._written, self._still_seconds = processes, written, still_seconds
        self._cpu_seconds: dict[int, float] = {}  # of each process, at the last progress
        self._seen: object = None
        self._moved_at = time.monotonic()

    def check(self) -> None:
        """Note progress since the last check.

        Raises:
            Deadlock: There has been none for `still_seconds`.
        """
        written, now = self._written(), time.monotonic()
        used = {pid: seconds for process in self._processes() for pid, seconds in _cpu_seconds(process)}
        worked = any(seconds - self._cpu_seconds.setdefault(pid, 0.0) >= WORK_SECONDS for pid, seconds in used.items())
        if worked or written != self._seen:
            self._cpu_seconds, self._seen, self._moved_at = used, written, now
        if now - self._moved_at > self._still_seconds:
            raise Deadlock(f"no progress for {self._still_seconds:g} s")


def wait_until(reached: Callable[[], bool], progress: Progress, poll_seconds: float = 0.005) -> None:
    """Wait until `reached` returns true, however long that takes, as long as there is progress.

    Raises:
        Deadlock: There is none any more.
    """
    next_check = 0.0
    while not reached():
        if time.monotonic() >= next_check:
            progress.check()
            next_check = time.monotonic() + 1.0
        time.sleep(poll_seconds)


class DeadlockDetector:
    """Fails a test that waits for ever: this process and all that it has started are idle.

    Services that are busy on their own (Ray's and Prefect's) don't count as progress.
    """

    def __init__(self, still_seconds: float = STILL_SECONDS) -> None:
        self._progress = Progress(_own_processes, still_seconds=still_seconds)
        self._check_seconds = still_seconds / CHECKS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadlock-detector", daemon=True)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGUSR2, _fail)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._check_seconds):
            try:
                self._progress.check()
            except Deadlock:
                faulthandler.dump_traceback(file=sys.__stderr__)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                return


def _fail(*_: object) -> None:
    raise Deadlock("the test and all that it started are idle, and wait for ever; see the stacks above")


def _own_processes() -> Iterator[psutil.Process]:
    own = psutil.Process()
    yield own
    for process in own.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not any(service in command for service in SERVICES):
            yield process


def _cpu_seconds(process: psutil.Process) -> Iterator[tuple[int, float]]:
    """Yield the process's id and CPU time, if it still exists."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        yield process.pid, times.user + times.system
