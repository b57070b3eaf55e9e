"""The tests' own detection of deadlocks: what is idle fails, and what is only slow does not."""

import os
import sys
import threading
import time

import psutil
import pytest

from tests.support.progress import (
    STILL_SECONDS,
    WORK_SECONDS,
    Deadlock,
    DeadlockDetector,
    Progress,
    own_progress,
    wait_until,
)


class ManualClock:
    """A clock that stands still until the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def use_processor() -> None:
    """Use enough CPU time to count as progress, however long that takes."""
    started = time.thread_time()
    while time.thread_time() - started < 1.2 * WORK_SECONDS:
        sum(range(10_000))


def test_a_wait_without_end_is_a_deadlock(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Deadlock), DeadlockDetector(still_seconds=0.5):
        threading.Event().wait()


def test_computing_is_progress() -> None:
    clock = ManualClock()
    progress = Progress(lambda: [psutil.Process()], clock=clock)
    progress.check()
    computing = threading.Thread(target=use_processor)
    computing.start()
    computing.join()
    clock.now += 2 * STILL_SECONDS
    progress.check()
    clock.now += 2 * STILL_SECONDS
    with pytest.raises(Deadlock, match="no progress for 120 s"):
        progress.check()


def test_the_thread_that_checks_makes_no_progress() -> None:
    clock = ManualClock()
    progress = Progress(lambda: [psutil.Process()], clock=clock)
    progress.check()
    use_processor()
    clock.now += 2 * STILL_SECONDS
    with pytest.raises(Deadlock):
        progress.check()


def test_writing_is_progress() -> None:
    written: list[int] = []

    def reached() -> bool:
        written.append(len(written))
        return len(written) > 100

    wait_until(reached, Progress(list, lambda: len(written), still_seconds=0.01), max_poll_seconds=0.02)


def test_waiting_for_a_processor_is_progress() -> None:
    busy = f"import os; os.sched_setaffinity(0, {[min(os.sched_getaffinity(0))]})\nwhile True: pass"
    starved, *others = (psutil.Popen([sys.executable, "-c", busy]) for _ in range(4))
    wait_until(lambda: all(len(process.cpu_affinity()) == 1 for process in (starved, *others)))
    clock = ManualClock()
    progress = Progress(list, clock=clock, services=lambda: [starved])
    try:
        clock.now += 2 * STILL_SECONDS
        progress.check()
        for process in others:
            process.kill()
        starved.suspend()
        wait_until(lambda: starved.status() == psutil.STATUS_STOPPED)
        clock.now += 2 * STILL_SECONDS
        with pytest.raises(Deadlock):
            progress.check()
    finally:
        for process in (starved, *others):
            process.kill()
            process.wait()


def test_the_detector_leaves_a_wait_to_its_own_checks() -> None:
    clock = ManualClock()
    progress = own_progress(clock=clock)
    progress.check()
    answers = iter((False, True))
    wait_until(lambda: next(answers))
    clock.now += 2 * STILL_SECONDS
    progress.check()


def test_a_process_that_is_gone_makes_no_progress() -> None:
    gone = psutil.Popen(["true"])
    gone.wait()
    with pytest.raises(Deadlock):
        wait_until(lambda: False, Progress(lambda: [gone], still_seconds=0.5))
