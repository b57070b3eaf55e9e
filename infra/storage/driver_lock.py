"""The lock that keeps a second driver from a run, and shows whether it has one."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from infra.storage.runs import RunDirectory
from schemas.errors import RunError

PROBE_SECONDS = 0.2  # for which `is_driven` of other processes may hold the lock


@contextmanager
def driver_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the run's lock: one driver at a time. The kernel releases it when the process dies.

    Raises:
        RunError: Another process is driving this run.
    """
    with (directory.path / "driver.lock").open("a") as file:
        if not _try_lock(file, fcntl.LOCK_EX):
            time.sleep(PROBE_SECONDS)
            if not _try_lock(file, fcntl.LOCK_EX):
                raise RunError(f"run {directory.run_id} is being driven by another process; stop that one first")
        yield


def is_driven(directory: RunDirectory) -> bool:
    """Return whether a process is driving the run; it may have ended when this returns."""
    try:
        with (directory.path / "driver.lock").open("r") as file:
            return not _try_lock(file, fcntl.LOCK_SH)  # shared: several processes may look at the same time
    except FileNotFoundError:
        return False


def _try_lock(file: IO[str], operation: int) -> bool:
    """Lock a file until it is closed; return False if another process holds a lock that excludes this one."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
