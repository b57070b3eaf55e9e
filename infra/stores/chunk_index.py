"""The books of one store: which chunks it holds, under which leases, in how many bytes."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import CapacityError, ChunkNotFoundError, LeaseError, LeaseExpiredError, StaleIncarnationError
from schemas.store import StoreUsage

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Entry(Generic[Payload]):
    """A held chunk, and where its bytes are."""

    ref: ChunkRef
    step: int
    payload: Payload


class ChunkIndex(Generic[Payload]):
    """One run's chunks, by key. What a payload is, its backend says. Not for several threads.

    Args:
        capacity_bytes: The limit of all held chunks together.
        lease_seconds: How long a lease lasts that nobody renews.
        incarnation: The name of this incarnation of the store; None makes a new one.
    """

    def __init__(self, capacity_bytes: int, lease_seconds: float, incarnation: str | None = None) -> None:
        self.incarnation = incarnation or uuid.uuid4().hex
        self._capacity_bytes, self._lease_seconds = capacity_bytes, lease_seconds
        self._entries: dict[str, Entry[Payload]] = {}
        self._deadlines: dict[int, float] = {}  # of the open leases, by step
        self._expired: set[int] = set()
        self._reserved: dict[str, tuple[int, int]] = {}  # key -> step and bytes of a put that is under way
        self._batches: dict[int, str] = {}
        self._peak_bytes = 0

    def open_lease(self, step: int) -> None:
        """See `ColumnStore.open_lease`."""
        self.sweep()
        self._expired.discard(step)
        self._renew(step)

    def require_lease(self, key: ChunkKey) -> None:
        """Renew the lease of a key's step.

        Raises:
            LeaseError: It is not open.
            LeaseExpiredError: Nobody renewed it in time.
        """
        self.sweep()
        if key.step in self._expired:
            raise expired_error(key, self._lease_seconds)
        if key.step not in self._deadlines:
            raise lease_error(key)
        self._renew(key.step)

    def find(self, key: ChunkKey) -> Entry[Payload] | None:
        """The chunk of this key, if it is held."""
        return self._entries.get(str(key))

    def is_reserved(self, key: ChunkKey) -> bool:
        """Whether a put of this key is under way."""
        return str(key) in self._reserved

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more would fit."""
        return self._held_bytes() + num_bytes <= self._capacity_bytes

    def may_get_room(self, step: int, num_bytes: int) -> bool:
        """Whether so many bytes would fit once the steps before and after `step` are cleared."""
        own = sum(entry.ref.num_bytes for entry in self._entries.values() if entry.step == step)
        own += sum(size for other, size in self._reserved.values() if other == step)
        return own + num_bytes <= self._capacity_bytes

    def reserve(self, key: ChunkKey, num_bytes: int) -> None:
        """Take room for a chunk that is about to be written; `commit` or `release` must follow.

        Raises:
            LeaseError: The step's lease is not open.
            CapacityError: There is no room.
        """
        self.require_lease(key)
        if not self.has_room(num_bytes):
            raise capacity_error(key, num_bytes, self._held_bytes(), self._capacity_bytes)
        self._reserved[str(key)] = (key.step, num_bytes)
        self._peak_bytes = max(self._peak_bytes, self._held_bytes())

    def release(self, key: ChunkKey) -> None:
        """Give back what `reserve` took."""
        self._reserved.pop(str(key), None)

    def commit(self, key: ChunkKey, num_rows: int, num_bytes: int, payload: Payload) -> ChunkRef:
        """Hold a chunk that has been written whole; from now on it is readable.

        Raises:
            LeaseError: The step was cleared while it was written.
        """
        self.release(key)
        self.require_lease(key)
        ref = ChunkRef(key=str(key), num_rows=num_rows, num_bytes=num_bytes, incarnation=self.incarnation)
        self._entries[ref.key] = Entry(ref, key.step, payload)
        return ref

    def payloads(self, refs: Sequence[ChunkRef]) -> list[Payload]:
        """Where the chunks' bytes are, in order; renews their steps' leases.

        Raises:
            ChunkNotFoundError: A chunk was never put, or was cleared.
            StaleIncarnationError: A chunk was put into another incarnation.
        """
        self.sweep()
        entries = [self._get(ref) for ref in refs]
        for step in {entry.step for entry in entries} & self._deadlines.keys():
            self._renew(step)
        return [entry.payload for entry in entries]

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        """See `ColumnStore.delete`."""
        gone = [self._entries.pop(ref.key) for ref in refs if self._holds(ref)]
        return sum(entry.ref.num_bytes for entry in gone)

    def drop(self, name: str | None) -> None:
        """Forget a chunk that is lost."""
        self._entries.pop(name or "", None)

    def clear(self, step: int) -> int:
        """See `ColumnStore.clear`."""
        self._deadlines.pop(step, None)
        self._expired.discard(step)
        return self._free(step)

    def sweep(self) -> list[int]:
        """Free the steps whose leases have expired; returns them."""
        now = time.monotonic()
        over = [step for step, deadline in self._deadlines.items() if deadline < now]
        for step in over:
            del self._deadlines[step]
            self._expired.add(step)
            self._free(step)
        return over

    def save_batch(self, step: int, batch: str) -> None:
        """See `ColumnStore.save_batch`; `batch` is JSON."""
        if step in self._deadlines:
            self._batches[step] = batch

    def load_batch(self, step: int) -> str | None:
        """See `ColumnStore.load_batch`."""
        return self._batches.get(step)

    def steps(self) -> list[int]:
        """See `ColumnStore.steps`."""
        return sorted({*self._deadlines, *(entry.step for entry in self._entries.values())})

    def usage(self) -> StoreUsage:
        """See `ColumnStore.usage`."""
        now = time.monotonic()
        live = {step for step, deadline in self._deadlines.items() if deadline >= now}
        entries = self._entries.values()
        return StoreUsage(
            num_chunks=len(entries),
            num_rows=sum(entry.ref.num_rows for entry in entries),
            num_bytes=sum(entry.ref.num_bytes for entry in entries),
            peak_bytes=self._peak_bytes,
            capacity_bytes=self._capacity_bytes,
            leaked_bytes=sum(entry.ref.num_bytes for entry in entries if entry.step not in live),
            open_leases=tuple(sorted(self._deadlines)),
        )

    def _renew(self, step: int) -> None:
        self._deadlines[step] = time.monotonic() + self._lease_seconds

    def _held_bytes(self) -> int:
        held = sum(entry.ref.num_bytes for entry in self._entries.values())
        return held + sum(size for _, size in self._reserved.values())

    def _free(self, step: int) -> int:
        self._batches.pop(step, None)
        gone = [name for name, entry in self._entries.items() if entry.step == step]
        return sum(self._entries.pop(name).ref.num_bytes for name in gone)

    def _holds(self, ref: ChunkRef) -> bool:
        return ref.incarnation == self.incarnation and ref.key in self._entries

    def _get(self, ref: ChunkRef) -> Entry[Payload]:
        check_incarnation(ref, self.incarnation)
        if ref.key not in self._entries:
            why = "the lease of its step expired" if ChunkKey.parse(ref.key).step in self._expired else ""
            raise chunk_not_found(ref, why)
        return self._entries[ref.key]


def check_incarnation(ref: ChunkRef, incarnation: str) -> None:
    """See that a reference is of this incarnation of the store.

    Raises:
        StaleIncarnationError: It is of another one.
    """
    if ref.incarnation != incarnation:
        raise StaleIncarnationError(
            f"chunk {ref.key} was put into store {ref.incarnation}, which is gone; this is {incarnation}: "
            "run the stage that produces it again"
        )


def chunk_not_found(ref: ChunkRef, why: str = "") -> ChunkNotFoundError:
    """The error of a chunk that is not there."""
    return ChunkNotFoundError(
        f"chunk {ref.key} is not in the store: {why or 'its step was cleared, or it was never put'}"
    )


def lease_error(key: ChunkKey) -> LeaseError:
    """The error of a put without a lease."""
    return LeaseError(
        f"can't put {key}: step {key.step} has no open lease; open it first, or the step was cleared already"
    )


def expired_error(key: ChunkKey, lease_seconds: float) -> LeaseExpiredError:
    """The error of a put under a lease that is over."""
    return LeaseExpiredError(
        f"can't put {key}: the lease of step {key.step} expired, as nobody renewed it for {lease_seconds:g} s, "
        "and its chunks were freed; raise store.lease_seconds, or run the step again"
    )


def capacity_error(key: ChunkKey, asked: int, held: int, limit: int) -> CapacityError:
    """The error of a put that would exceed the capacity."""
    return CapacityError(
        f"can't put {key}: {asked} bytes asked, {held} held, limit {limit}; "
        "raise store.capacity_bytes or make the step smaller"
    )
