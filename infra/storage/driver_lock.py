"""The lock that keeps a second driver from a run."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from infra.storage.runs import RunDirectory
from schemas.errors import RunError


@contextmanager
def driver_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the run's lock: one driver at a time. The kernel releases it when the process dies.

    Raises:
        RunError: Another process is driving this run.
    """
    with (directory.path / "driver.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"run {directory.run_id} is being driven by another process; stop that one first") from None
        yield
