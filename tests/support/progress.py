"""Waiting without a time limit: a wait fails when nothing makes progress any more, not when it is slow.

A test with a limit of some seconds would fail on a slow or busy machine. A deadlock shows in another way: none of the
processes that are waited for uses the processor any more or waits for its turn, and nothing that they write grows.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

STILL_SECONDS = 120.0  # without progress: a deadlock
WORK_SECONDS = 1.0  # of CPU time of one process; an idle one uses less in `STILL_SECONDS`
STARVED_FRACTION = 0.2  # of the time that a thread waits for a processor: it has work, but doesn't get to do it
SAMPLE_SECONDS = 2.0  # over which that is measured
NUM_CHECKS = 8  # within `still_seconds`: one looks at every process
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 1.0
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


_num_polls = 0  # of all waits so far


def children_running(part: str, of: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the children of a process, by default this one, of which an argument has such a part, and that live."""
    found = []
    for child in (of or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if any(part in argument for argument in child.cmdline()):
                found.append(child)
    return found


class Deadlock(AssertionError):
    """Nothing that is waited for makes progress any more."""


class Progress:
    """The progress of some processes: the CPU time that they use, and what they write.

    The thread that checks does not count, or a wait would be progress.

    Args:
        processes: Return the processes that should be working; called again for each check.
        written: Return a value that changes with what they have written, such as sizes or modification times.
        still_seconds: Seconds without progress that make a deadlock.
        clock: Return the time in seconds.
        services: Return processes that are never quite idle, and so only count if other processes keep them from
            the processors.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[psutil.Process]],
        written: Callable[[], object] = lambda: None,
        still_seconds: float = STILL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        services: Callable[[], Iterable[psutil.Process]] = tuple,
    ) -> None:
        self._processes, self._written, self._still_seconds, self._clock = processes, written, still_seconds, clock
        self.check_seconds = still_seconds / NUM_CHECKS  # between two checks
        self._services = services
        self._cpu_seconds: dict[int, float] = {}  # of each process, at the last progress
        self._seen: object = None
        self._moved_at = clock()

    def check(self) -> None:
        """Look for progress since the last check that found any.

        Raises:
            Deadlock: There has been none for `still_seconds`.
        """
        written, now = self._written(), self._clock()
        used = {pid: seconds for process in self._processes() for pid, seconds in _cpu_seconds(process)}
        worked = any(seconds - self._cpu_seconds.setdefault(pid, 0.0) >= WORK_SECONDS for pid, seconds in used.items())
        if worked or written != self._seen:
            self._cpu_seconds, self._seen, self._moved_at = used, written, now
        if now - self._moved_at > self._still_seconds:
            if _any_starved([*self._processes(), *self._services()]):
                self._moved_at = self._clock()
                return
            raise Deadlock(f"no progress for {self._still_seconds:g} s")


def wait_until(
    reached: Callable[[], object], progress: Progress | None = None, max_poll_seconds: float = MAX_POLL_SECONDS
) -> None:
    """Wait until `reached` returns a true value, however long that takes, as long as there is progress.

    Args:
        reached: The condition. It is polled ever less often, so that the polls don't keep other processes busy.
        progress: The progress that is waited for; None: that of this process and of all that it has started.
        max_poll_seconds: Longest pause between two polls.

    Raises:
        Deadlock: There is no progress any more.
    """
    global _num_polls
    progress = progress or Progress(_own_processes, services=_all_children)
    started = now = next_check = time.monotonic()
    while not reached():
        _num_polls += 1
        if now >= next_check:
            progress.check()
            next_check = now + progress.check_seconds
        time.sleep(min(max((now - started) / 20, MIN_POLL_SECONDS), max_poll_seconds))
        now = time.monotonic()


def own_progress(still_seconds: float = STILL_SECONDS, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return the progress of this process and of all that it has started; a wait in it does its own checks."""
    return Progress(_own_processes, lambda: _num_polls, still_seconds, clock, _all_children)


class DeadlockDetector:
    """Fails a test that waits forever: this process and all that it has started are idle.

    Services that are never quite idle (Ray's and Prefect's) don't count.
    """

    def __init__(self, still_seconds: float = STILL_SECONDS) -> None:
        self._progress = own_progress(still_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadlock-detector", daemon=True)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGUSR2, _fail)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._progress.check_seconds):
            try:
                self._progress.check()
            except Deadlock:
                faulthandler.dump_traceback(file=sys.__stderr__)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                return


def _fail(*_: object) -> None:
    raise Deadlock("the test and all that it started are idle and wait forever; see the stacks above")


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


def _all_children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _any_starved(processes: list[psutil.Process]) -> bool:
    """Return whether a thread of a process has to wait for a processor for much of the time."""
    before = dict(_queue_seconds(processes))
    time.sleep(SAMPLE_SECONDS)
    limit = STARVED_FRACTION * SAMPLE_SECONDS
    return any(seconds - before.get(thread, seconds) >= limit for thread, seconds in _queue_seconds(processes))


def _queue_seconds(processes: list[psutil.Process]) -> Iterator[tuple[str, float]]:
    """Yield each thread and the seconds for which it has been ready to run, but has waited for a processor."""
    for process in processes:
        for schedule in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                yield str(schedule), int(schedule.read_text().split()[1]) / 1e9


def _cpu_seconds(process: psutil.Process) -> Iterator[tuple[int, float]]:
    """Yield the process's id and CPU time, without the calling thread's, if it still exists."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        yield process.pid, times.user + times.system - (time.thread_time() if process.pid == os.getpid() else 0.0)
