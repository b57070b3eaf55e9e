"""The lock of a run on a remote file system, which has none: numbered objects that are created exclusively.

    locks/driver-000007.lock

The owner of the highest number drives the run, and writes its object again every few seconds. Who finds it unchanged
for a lease, by its own clock alone, takes over with the next number. So the clocks of machines need not agree.
"""

import logging
import os
import re
import socket
import threading
import time
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from infra.storage.folder import Folder
from schemas.base import Frozen
from schemas.errors import RunError, RunTakenOverError

BEAT_SECONDS = 3.0  # between two writes of the owner
LEASE_SECONDS = 30.0  # without one, after which another driver may take over
OBSERVE_SECONDS = 9.0  # in which who only looks must see a write
_POLL_SECONDS = 1.0
_FOLDER = "locks"

logger = logging.getLogger(__name__)


class Driver(NamedTuple):
    """The process that drives a run."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class LockRecord(Frozen):
    """The content of a lock's object."""

    pid: PositiveInt
    host: str
    beat: NonNegativeInt = 0
    """How often the owner has written it."""
    is_free: bool = False
    """Whether the owner has released it."""

    @property
    def driver(self) -> Driver:
        """The owner."""
        return Driver(self.pid, self.host)


class Lease:
    """The lock of one run, while this process holds it.

    Args:
        folder: The run's directory.
        run_id: The run.
        beat_seconds: Seconds between two writes.
        lease_seconds: Seconds after which another owner counts as dead.
    """

    def __init__(
        self, folder: Folder, run_id: str, beat_seconds: float = BEAT_SECONDS, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self._folder, self._run_id = folder, run_id
        self._beat_seconds, self._lease_seconds = beat_seconds, lease_seconds
        self._record = LockRecord(pid=os.getpid(), host=socket.gethostname())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lock of {run_id}", daemon=True)
        self.number, self.is_lost = 0, False

    def acquire(self) -> None:
        """Take the lock; wait for a lease if its last owner has not released it.

        Raises:
            RunError: Another process drives the run.
        """
        last = self._await_release()
        self.number = last + 1
        try:
            self._folder.create(_name(self.number), self._record.model_dump_json().encode())
        except FileExistsError:
            raise RunError(f"run {self._run_id} was started by another process at this moment") from None
        for number in _numbers(self._folder):
            if number < self.number:
                self._folder.remove(_name(number))
        _held[str(self._folder)] = self
        self._thread.start()

    def release(self) -> None:
        """Release the lock, if this process still holds it: the next driver need not wait."""
        _held.pop(str(self._folder), None)
        self._ended.set()
        self._thread.join()
        try:
            self.look()
            if not self.is_lost:
                self._write(is_free=True)
        except OSError as error:
            logger.warning("the lock of run %s can't be released: %s", self._run_id, error)

    @property
    def driver(self) -> Driver:
        """This process."""
        return self._record.driver

    def look(self) -> None:
        """Look whether another driver has taken over.

        Raises:
            OSError: The file system can't be reached.
        """
        self.is_lost = self.is_lost or max(_numbers(self._folder), default=0) > self.number

    def require(self) -> None:
        """Check that no other driver was seen to have taken over.

        Raises:
            RunTakenOverError: One has.
        """
        if self.is_lost:
            raise RunTakenOverError(
                f"another driver has taken over run {self._run_id}, as nothing was heard of this one for "
                f"{self._lease_seconds:g} s; this one stops without writing anything more"
            )

    def _await_release(self) -> int:
        """Return the number of the last lock, once its owner has released it or counts as dead."""
        seen, since, is_announced = find_lock(self._folder), time.monotonic(), False
        while seen is not None and seen.is_held:
            if time.monotonic() - since > self._lease_seconds:
                break
            owner = seen.record.driver if seen.record else "another process"
            if not is_announced:
                logger.info(
                    "run %s was last driven by %s, which has not released it: waiting %g s for a sign of life",
                    *(self._run_id, owner, self._lease_seconds),
                )
                is_announced = True
            time.sleep(min(_POLL_SECONDS, self._lease_seconds / 10))
            now = find_lock(self._folder)
            if now is not None and now != seen and now.is_held:
                raise RunError(f"run {self._run_id} is being driven by {now.record.driver if now.record else owner}")
            seen = now
        return seen.number if seen else 0

    def _renew(self) -> None:
        is_failing = False
        while not self._ended.wait(self._beat_seconds):
            try:
                self.look()
                if self.is_lost:
                    return
                self._write()
                is_failing = False
            except OSError as error:
                if not is_failing:
                    logger.warning("the lock of run %s can't be renewed: %s", self._run_id, error)
                is_failing = True

    def _write(self, *, is_free: bool = False) -> None:
        self._record = self._record.replace(beat=self._record.beat + 1, is_free=is_free)
        self._folder.write(_name(self.number), self._record.model_dump_json().encode())


class FoundLock(NamedTuple):
    """The newest lock of a run."""

    number: int
    record: LockRecord | None  # None: it is damaged

    @property
    def is_held(self) -> bool:
        """Whether its owner has not released it, as far as is known."""
        return self.record is None or not self.record.is_free


_held: dict[str, Lease] = {}  # of this process, by run directory


def held_lease(folder: Folder) -> Lease | None:
    """Return the lock that this process holds on a run; None if it doesn't."""
    return _held.get(str(folder))


def find_lock(folder: Folder) -> FoundLock | None:
    """Return the newest lock of a run, which may be released; None if it never had one."""
    if not (numbers := _numbers(folder)):
        return None
    content = folder.read(_name(max(numbers)))
    if content is None:  # removed by the owner of a newer one
        return find_lock(folder)
    try:
        return FoundLock(max(numbers), LockRecord.model_validate_json(content))
    except ValidationError:
        return FoundLock(max(numbers), None)


def observe_driver(folder: Folder, seconds: float = OBSERVE_SECONDS) -> Driver | None:
    """Return the process that drives a run; None if there is none, for which it may have to watch for `seconds`."""
    if (own := held_lease(folder)) is not None:
        return own.driver
    first, deadline = find_lock(folder), time.monotonic() + seconds
    now = first
    while now is not None and now.is_held:
        if now != first and now.record is not None:
            return now.record.driver
        if time.monotonic() > deadline:
            return None
        time.sleep(min(_POLL_SECONDS, seconds / 10))
        now = find_lock(folder)
    return None


def _numbers(folder: Folder) -> list[int]:
    found = (re.fullmatch(rf"{_FOLDER}/driver-(\d+)\.lock", name) for name in folder.sizes(_FOLDER))
    return [int(match[1]) for match in found if match]


def _name(number: int) -> str:
    return f"{_FOLDER}/driver-{number:06d}.lock"
