"""The tests' own detector of deadlocks: it sees what is idle, and leaves what is slow alone."""

import threading
import time

import psutil
import pytest

from tests.progress import Deadlock, DeadlockDetector, Progress, wait_until


def test_what_waits_for_ever_is_a_deadlock(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Deadlock), DeadlockDetector(still_seconds=0.5):
        threading.Event().wait()


def test_what_computes_is_none() -> None:
    started = time.process_time()
    with DeadlockDetector(still_seconds=5.0):
        while time.process_time() - started < 6.0:
            sum(range(10_000))


def test_what_writes_is_none() -> None:
    written: list[int] = []

    def reached() -> bool:
        written.append(len(written))
        return len(written) > 100

    wait_until(reached, Progress(list, lambda: len(written), still_seconds=0.01), poll_seconds=0.02)


def test_a_process_that_is_gone_makes_no_progress() -> None:
    gone = psutil.Popen(["true"])
    gone.wait()
    with pytest.raises(Deadlock):
        wait_until(lambda: False, Progress(lambda: [gone], still_seconds=0.5))
