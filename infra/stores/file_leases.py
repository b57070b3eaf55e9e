"""The leases of `FsspecColumnStore`: one small file per step."""

from collections.abc import Callable

from infra.storage.folder import Folder
from infra.stores.chunk_errors import lease_expired_error, no_lease_error
from infra.stores.file_layout import LEASES, lease_path, leased_step, load_record
from schemas.base import Frozen
from schemas.batch import ChunkKey


class Lease(Frozen):
    """A step's permission to put. Once it is marked as expired, the step's chunks are freed."""

    until: float  # seconds since 1970
    expired: bool = False


class FileLeases:
    """The leases of one store's steps. An archived step has none.

    Args:
        folder: The store's folder.
        lease_seconds: How long a lease lasts unless it is renewed.
        clock: Returns the time in seconds, the same in all processes that use the store.
    """

    def __init__(self, folder: Folder, lease_seconds: float, clock: Callable[[], float]) -> None:
        self._folder, self._lease_seconds, self._clock = folder, lease_seconds, clock

    def find(self, step: int) -> Lease | None:
        """Return the step's lease; None if it has none."""
        return load_record(self._folder, lease_path(step), Lease)

    def steps(self) -> list[int]:
        """Return the steps that have a lease, in order."""
        return sorted(step for path in self._folder.sizes(LEASES) if (step := leased_step(path)) is not None)

    def is_expired(self, step: int) -> bool:
        """Return whether the step's lease is marked as expired."""
        lease = self.find(step)
        return lease is not None and lease.expired

    def is_overdue(self, lease: Lease) -> bool:
        """Return whether a lease's time is up, so that the next sweep frees its step."""
        return lease.until < self._clock()

    def renew(self, step: int) -> None:
        """Open the step's lease, or renew it."""
        self._write(step, Lease(until=self._clock() + self._lease_seconds))

    def renew_if_open(self, step: int) -> None:
        """Renew the step's lease if it is open and half of its time is over."""
        lease = self.find(step)
        if lease is not None and not lease.expired:
            self._renew_past_half(step, lease)

    def require(self, key: ChunkKey) -> None:
        """Check that a key's step has an open lease; renew it if half of its time is over.

        Raises:
            LeaseError: The lease is not open.
            LeaseExpiredError: It was not renewed in time.
        """
        lease = self.find(key.step)
        if lease is None:
            raise no_lease_error(key)
        if lease.expired:
            raise lease_expired_error(key, self._lease_seconds)
        self._renew_past_half(key.step, lease)

    def close(self, step: int) -> None:
        """Remove the step's lease, if it has one."""
        self._folder.remove(lease_path(step))

    def expire(self) -> list[int]:
        """Mark the leases whose time is up as expired; return their steps."""
        expired = []
        for step in self.steps():
            lease = self.find(step)
            if lease is not None and not lease.expired and self.is_overdue(lease):
                self._write(step, lease.replace(expired=True))
                expired.append(step)
        return expired

    def _renew_past_half(self, step: int, lease: Lease) -> None:
        if lease.until - self._clock() < self._lease_seconds / 2:
            self.renew(step)

    def _write(self, step: int, lease: Lease) -> None:
        self._folder.write(lease_path(step), lease.model_dump_json().encode())
