"""The lock that keeps a second driver from a run or a pipeline, and shows whether it has one.

In a local folder it is a lock of the kernel on `driver.lock`; elsewhere a lease, see `infra.storage.lease`.
"""

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import IO, NoReturn, TypeVar

from infra.storage.lease import Driver, Lease, held_lease, observe_driver
from infra.storage.runs import RunDirectory
from schemas.errors import ConfigError, RunError

PROBE_SECONDS = 0.2  # for which `is_driven` of other processes may hold the lock
_POLL_SECONDS = 1.0

R = TypeVar("R")


@contextmanager
def driver_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the run's lock: one driver at a time.

    In a local folder, the kernel releases it when the process dies; elsewhere, the next driver waits for a lease.

    Raises:
        RunError: Another process is driving this run.
    """
    if directory.is_local:
        lock = file_lock(directory.path / "driver.lock", f"run {directory.run_id}", _advice(directory))
    else:
        lock = _lease(directory)
    with lock:
        yield


@contextmanager
def file_lock(path: Path, what: str, advice: str) -> Iterator[None]:
    """Hold the kernel's lock on a file, which says whose it is.

    Args:
        path: The file; its folder exists.
        what: What is locked, for the error.
        advice: What to do if another process has it.

    Raises:
        RunError: Another process has it.
    """
    with path.open("a") as file:
        if not _try_lock(file, fcntl.LOCK_EX):
            time.sleep(PROBE_SECONDS)
            if not _try_lock(file, fcntl.LOCK_EX):
                raise RunError(f"{what} is being driven by {_owner(path) or 'another process'}; {advice}")
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}")
        file.flush()
        yield


def holds_lock(directory: RunDirectory) -> bool:
    """Return whether this process may still change what belongs to a run: no other driver is known to have taken over.

    A process that has never driven the run may.
    """
    lease = _held(directory)
    if lease is None:
        return True
    with suppress(OSError):  # what is known counts
        lease.look()
    return not lease.is_lost


def require_lock(directory: RunDirectory) -> None:
    """Check that this process may still write to a run that it drives.

    Raises:
        RunTakenOverError: Another driver has taken over.
        OSError: The run directory can't be reached.
    """
    if (lease := _held(directory)) is not None:
        lease.look()
        lease.require()


async def finish_in_thread(work: Callable[[], R], on_cancel: Callable[[], None] = lambda: None) -> R:
    """Run `work` while the event loop goes on; cancelled, this ends only after it, which writes under the lock.

    Args:
        work: What runs, in the flow run's context, for the log.
        on_cancel: Called when this is cancelled, before the end of `work` is awaited.
    """
    thread = asyncio.get_running_loop().run_in_executor(None, copy_context().run, work)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        on_cancel()
        while not thread.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        raise


async def watch_lock(directory: RunDirectory) -> NoReturn:
    """Wait until another driver has taken over the run that this process drives: forever, in a local folder.

    Raises:
        RunTakenOverError: One has.
    """
    lease = _held(directory)
    while True:
        if lease is not None:
            lease.require()
        await asyncio.sleep(_POLL_SECONDS)


def find_driver(directory: RunDirectory) -> Driver | None:
    """Return the process that drives the run; None if there is none.

    Raises:
        RunError: It takes or releases the run just now.
    """
    if not directory.is_local:
        return observe_driver(directory.folder)
    if not is_driven(directory):
        return None
    if (driver := _owner(directory.path / "driver.lock")) is None:
        raise RunError(f"run {directory.run_id} is being started or ended by another process; try again in a moment")
    return driver


def is_driven(directory: RunDirectory) -> bool:
    """Return whether a process is driving the run; it may have ended when this returns."""
    if not directory.is_local:
        return observe_driver(directory.folder) is not None
    try:
        with (directory.path / "driver.lock").open("r") as file:
            return not _try_lock(file, fcntl.LOCK_SH)  # shared: several processes may look at the same time
    except FileNotFoundError:
        return False


@contextmanager
def _lease(directory: RunDirectory) -> Iterator[None]:
    lease = Lease(directory.folder, directory.run_id)
    try:
        lease.acquire()
    except RunError as error:
        raise RunError(f"{error}; {_advice(directory)}") from None
    try:
        yield
    finally:
        lease.release()


def _held(directory: RunDirectory) -> Lease | None:
    return None if directory.is_local else held_lease(directory.folder)


def _owner(path: Path) -> Driver | None:
    """Return the process that a locked file names; None if it is just being written."""
    pid, _, host = path.read_text().partition(" ")
    return Driver(int(pid), host) if host else None


def _advice(directory: RunDirectory) -> str:
    return f"stop it first: sluice stop {directory.argument}"


def _try_lock(file: IO[str], operation: int) -> bool:
    """Lock a file until it is closed; return False if another process holds a lock that excludes this one."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{file.name} can't be locked, which keeps two drivers apart: {error}; mount its file system with flock "
            "(Lustre: -o flock), or choose a folder on another one (runtime.runs_dir)"
        ) from None
    return True
