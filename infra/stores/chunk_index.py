"""The index of one store (its chunks, their leases, their bytes), and the store in this process's memory."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from infra.stores.base import (
    ColumnStore,
    capacity_error,
    check_incarnation,
    check_same_content,
    chunk_not_found_error,
    lease_expired_error,
    no_lease_error,
)
from infra.stores.chunk_reads import ChunkRead, decode_chunk
from rl_core.columns.codec import decode, encode
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.store import StoreUsage

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Entry(Generic[Payload]):
    """A held chunk, and what its backend needs to find its bytes."""

    ref: ChunkRef
    step: int
    payload: Payload


class ChunkIndex(Generic[Payload]):
    """One run's chunks by key. Each backend has its own payload type. Not thread-safe.

    Args:
        capacity_bytes: The limit on the bytes of all held chunks together.
        lease_seconds: How long a lease lasts unless it is renewed.
        incarnation: The name of this incarnation of the store; None makes a new one.
        clock: Returns the time in seconds.
        on_drop: Called with the payload of a chunk that is removed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        lease_seconds: float,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_drop: Callable[[Payload], object] = lambda _: None,
    ) -> None:
        self.incarnation = incarnation or uuid.uuid4().hex
        self._capacity_bytes, self._lease_seconds, self._clock = capacity_bytes, lease_seconds, clock
        self._on_drop = on_drop
        self._entries: dict[str, Entry[Payload]] = {}
        self._deadlines: dict[int, float] = {}  # of the open leases, by step
        self._expired: set[int] = set()
        self._step_bytes = Counter[int]()  # of the held chunks, by step
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
            LeaseError: The lease is not open.
            LeaseExpiredError: It was not renewed in time.
        """
        self.sweep()
        if key.step in self._expired:
            raise lease_expired_error(key, self._lease_seconds)
        if key.step not in self._deadlines:
            raise no_lease_error(key)
        self._renew(key.step)

    def find(self, key: ChunkKey) -> Entry[Payload] | None:
        """Return the chunk under this key; None if there is none."""
        return self._entries.get(str(key))

    def fits(self, num_bytes: int) -> bool:
        """Return whether a chunk of this size fits now."""
        return self._held_bytes() + num_bytes <= self._capacity_bytes

    def spare_bytes(self) -> int:
        """Return how many more bytes the store may hold."""
        return max(0, self._capacity_bytes - self._held_bytes())

    def fits_alone(self, step: int, num_bytes: int) -> bool:
        """Return whether a chunk of this size would fit if all steps but `step` were cleared."""
        return self._step_bytes[step] + num_bytes <= self._capacity_bytes

    def add(self, key: ChunkKey, num_rows: int, num_bytes: int, payload: Payload) -> ChunkRef:
        """Add a chunk that has been written completely, which makes it readable.

        Raises:
            LeaseError: The step's lease is not open.
            CapacityError: The chunk doesn't fit.
        """
        self.require_lease(key)
        if not self.fits(num_bytes):
            raise capacity_error(key, num_bytes, self._held_bytes(), self._capacity_bytes)
        ref = ChunkRef(key=str(key), num_rows=num_rows, num_bytes=num_bytes, incarnation=self.incarnation)
        self._entries[ref.key] = Entry(ref, key.step, payload)
        self._step_bytes[key.step] += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes())
        return ref

    def payloads(self, refs: Sequence[ChunkRef]) -> list[Payload]:
        """Return the chunks' payloads, in order, and renew their steps' leases.

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
        return sum(self._drop(ref.key) for ref in refs if self._holds(ref))

    def drop(self, is_lost: Callable[[Payload], bool]) -> None:
        """Remove the chunks whose bytes are lost, by their payloads."""
        for name in [name for name, entry in self._entries.items() if is_lost(entry.payload)]:
            self._drop(name)

    def clear(self, step: int) -> int:
        """See `ColumnStore.clear`."""
        self._deadlines.pop(step, None)
        self._expired.discard(step)
        return self._free(step)

    def sweep(self) -> list[int]:
        """Free the steps whose leases have expired; return them."""
        now = self._clock()
        expired = [step for step, deadline in self._deadlines.items() if deadline < now]
        for step in expired:
            del self._deadlines[step]
            self._expired.add(step)
            self._free(step)
        return expired

    def save_batch(self, step: int, batch: str) -> None:
        """See `ColumnStore.save_batch`; `batch` is JSON."""
        if step in self._deadlines:
            self._batches[step] = batch

    def load_batch(self, step: int) -> str | None:
        """See `ColumnStore.load_batch`."""
        return self._batches.get(step)

    def steps(self) -> list[int]:
        """See `ColumnStore.steps`."""
        return sorted({*self._deadlines, *self._step_bytes})

    def chunks(self, step: int) -> list[ChunkRef]:
        """See `ColumnStore.chunks`."""
        return [entry.ref for entry in self._entries.values() if entry.step == step]

    def usage(self) -> StoreUsage:
        """See `ColumnStore.usage`."""
        now = self._clock()
        live = {step for step, deadline in self._deadlines.items() if deadline >= now}
        entries = self._entries.values()
        return StoreUsage(
            num_chunks=len(entries),
            num_rows=sum(entry.ref.num_rows for entry in entries),
            num_bytes=self._held_bytes(),
            peak_bytes=self._peak_bytes,
            capacity_bytes=self._capacity_bytes,
            leaked_bytes=sum(size for step, size in self._step_bytes.items() if step not in live),
            open_leases=tuple(sorted(self._deadlines)),
        )

    def _renew(self, step: int) -> None:
        self._deadlines[step] = self._clock() + self._lease_seconds

    def _held_bytes(self) -> int:
        return self._step_bytes.total()

    def _free(self, step: int) -> int:
        self._batches.pop(step, None)
        names = [name for name, entry in self._entries.items() if entry.step == step]
        return sum(self._drop(name) for name in names)

    def _drop(self, name: str) -> int:
        entry = self._entries.pop(name)
        self._step_bytes[entry.step] -= entry.ref.num_bytes
        if not self._step_bytes[entry.step]:
            del self._step_bytes[entry.step]
        self._on_drop(entry.payload)
        return entry.ref.num_bytes

    def _holds(self, ref: ChunkRef) -> bool:
        return ref.incarnation == self.incarnation and ref.key in self._entries

    def _get(self, ref: ChunkRef) -> Entry[Payload]:
        check_incarnation(ref, self.incarnation)
        if ref.key not in self._entries:
            raise chunk_not_found_error(ref, lease_expired=ChunkKey.parse(ref.key).step in self._expired)
        return self._entries[ref.key]


class MemoryStore(ColumnStore):
    """Encoded chunks in this process's memory. Not thread-safe, so a put into a full store fails without waiting.

    Args:
        run_id: The run whose columns these are.
        capacity_bytes: The limit on the bytes of all held chunks together.
        lease_seconds: How long a lease lasts unless it is renewed.
        incarnation: The name of this incarnation; None makes a new one.
        clock: Returns the time in seconds, by which leases expire.
    """

    def __init__(
        self,
        run_id: str,
        capacity_bytes: int,
        lease_seconds: float = 3600,
        incarnation: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run_id)
        self._index = ChunkIndex[pa.Buffer](capacity_bytes, lease_seconds, incarnation, clock)
        self.incarnation = self._index.incarnation

    def verify(self, batch: BatchHandle) -> None:
        self._index.payloads(batch.chunks)

    def open_lease(self, step: int) -> None:
        self._index.open_lease(step)

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        return self._index.delete(refs)

    def clear(self, step: int) -> int:
        return self._index.clear(step)

    def steps(self) -> list[int]:
        return self._index.steps()

    def chunks(self, step: int) -> list[ChunkRef]:
        return self._index.chunks(step)

    def save_batch(self, batch: BatchHandle) -> None:
        self._index.save_batch(batch.step, batch.model_dump_json())

    def load_batch(self, step: int) -> BatchHandle | None:
        saved = self._index.load_batch(step)
        return None if saved is None else BatchHandle.model_validate_json(saved)

    def usage(self) -> StoreUsage:
        return self._index.usage()

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        self._index.require_lease(key)
        if held := self._index.find(key):
            return check_same_content(held.ref, decode(held.payload), columns)
        data = pa.py_buffer(memoryview(encode(columns)).toreadonly())
        return self._index.add(key, columns.num_rows, data.size, data)

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        payloads = self._index.payloads([read.ref for read in reads])
        return [decode_chunk(read.ref, data, read.names) for read, data in zip(reads, payloads, strict=True)]
