"""The index of one store (its open steps, their chunks and bytes), and the store in this process's memory."""

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
    step_not_open_error,
)
from infra.stores.chunk_reads import ChunkRead, decode_chunk
from rl_core.columns.codec import decode, encode
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, StoreUsage

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
        incarnation: The name of this incarnation of the store; None makes a new one.
        on_drop: Called with the payload of a chunk that is removed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        incarnation: str | None = None,
        on_drop: Callable[[Payload], object] = lambda _: None,
    ) -> None:
        self.incarnation = incarnation or uuid.uuid4().hex
        self._capacity_bytes, self._on_drop = capacity_bytes, on_drop
        self._entries: dict[str, Entry[Payload]] = {}
        self._open_steps: set[int] = set()
        self._step_bytes = Counter[int]()  # of the held chunks, by step
        self._batches: dict[int, str] = {}
        self._peak_bytes = 0

    def open(self, step: int) -> None:
        """See `ColumnStore.open`."""
        self._open_steps.add(step)

    def require_open(self, key: ChunkKey) -> None:
        """Check that a key's step is open.

        Raises:
            StepNotOpenError: It is not.
        """
        if key.step not in self._open_steps:
            raise step_not_open_error(key)

    def find(self, key: ChunkKey) -> Entry[Payload] | None:
        """Return the chunk under this key; None if there is none."""
        return self._entries.get(str(key))

    def must_wait(self, key: ChunkKey, num_bytes: int) -> bool:
        """Return whether a new chunk of this size doesn't fit now, but would once other steps are cleared."""
        fits_alone = self._step_bytes[key.step] + num_bytes <= self._capacity_bytes
        return key.step in self._open_steps and not (self.find(key) or self._fits(num_bytes)) and fits_alone

    def spare_bytes(self) -> int:
        """Return how many more bytes the store may hold."""
        return max(0, self._capacity_bytes - self._held_bytes())

    def add(self, key: ChunkKey, num_rows: int, num_bytes: int, payload: Payload) -> ChunkRef:
        """Add a chunk that has been written completely, which makes it readable.

        Raises:
            StepNotOpenError: The step is not open.
            CapacityError: The chunk doesn't fit.
        """
        self.require_open(key)
        if not self._fits(num_bytes):
            raise capacity_error(key, num_bytes, self._held_bytes(), self._capacity_bytes)
        ref = ChunkRef(key=str(key), num_rows=num_rows, num_bytes=num_bytes, incarnation=self.incarnation)
        self._entries[ref.key] = Entry(ref, key.step, payload)
        self._step_bytes[key.step] += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes())
        return ref

    def payloads(self, refs: Sequence[ChunkRef]) -> list[Payload]:
        """Return the chunks' payloads, in order.

        Raises:
            ChunkNotFoundError: A chunk was never put, or was cleared.
            StaleIncarnationError: A chunk was put into another incarnation.
        """
        return [self._get(ref).payload for ref in refs]

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        """See `ColumnStore.delete`."""
        return sum(self._drop(ref.key) for ref in refs if self._holds(ref))

    def drop(self, is_lost: Callable[[Payload], bool]) -> None:
        """Remove the chunks whose bytes are lost, by their payloads."""
        for name in [name for name, entry in self._entries.items() if is_lost(entry.payload)]:
            self._drop(name)

    def clear(self, step: int) -> int:
        """See `ColumnStore.clear`."""
        self._open_steps.discard(step)
        self._batches.pop(step, None)
        freed = sum(self._drop(ref.key) for ref in self.chunks(step))
        del self._step_bytes[step]
        return freed

    def save_batch(self, step: int, batch: str) -> None:
        """See `ColumnStore.save_batch`; `batch` is JSON."""
        if step in self._open_steps:
            self._batches[step] = batch

    def load_batch(self, step: int) -> str | None:
        """See `ColumnStore.load_batch`."""
        return self._batches.get(step)

    def steps(self) -> list[int]:
        """See `ColumnStore.steps`."""
        return sorted(self._open_steps)

    def chunks(self, step: int) -> list[ChunkRef]:
        """See `ColumnStore.chunks`."""
        return [entry.ref for entry in self._entries.values() if entry.step == step]

    def usage(self) -> StoreUsage:
        """See `ColumnStore.usage`."""
        entries = self._entries.values()
        return StoreUsage(
            num_chunks=len(entries),
            num_rows=sum(entry.ref.num_rows for entry in entries),
            num_bytes=self._held_bytes(),
            peak_bytes=self._peak_bytes,
            capacity_bytes=self._capacity_bytes,
            open_steps=tuple(self.steps()),
        )

    def _fits(self, num_bytes: int) -> bool:
        return self._held_bytes() + num_bytes <= self._capacity_bytes

    def _held_bytes(self) -> int:
        return self._step_bytes.total()

    def _drop(self, name: str) -> int:
        entry = self._entries.pop(name)
        self._step_bytes[entry.step] -= entry.ref.num_bytes
        self._on_drop(entry.payload)
        return entry.ref.num_bytes

    def _holds(self, ref: ChunkRef) -> bool:
        return ref.incarnation == self.incarnation and ref.key in self._entries

    def _get(self, ref: ChunkRef) -> Entry[Payload]:
        check_incarnation(ref, self.incarnation)
        if ref.key not in self._entries:
            raise chunk_not_found_error(ref)
        return self._entries[ref.key]


class MemoryStore(ColumnStore):
    """Encoded chunks in this process's memory. Not thread-safe, so a put into a full store fails without waiting.

    Args:
        run_id: The run whose columns these are.
        capacity_bytes: The limit on the bytes of all held chunks together.
        incarnation: The name of this incarnation; None makes a new one.
    """

    def __init__(self, run_id: str, capacity_bytes: int, incarnation: str | None = None) -> None:
        super().__init__(run_id)
        self._index = ChunkIndex[pa.Buffer](capacity_bytes, incarnation)
        self.incarnation = self._index.incarnation

    def verify(self, batch: BatchHandle) -> None:
        self._index.payloads(batch.chunks)

    def open(self, step: int) -> None:
        self._index.open(step)

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
        self._index.require_open(key)
        if held := self._index.find(key):
            return check_same_content(held.ref, decode(held.payload), columns)
        data = pa.py_buffer(memoryview(encode(columns)).toreadonly())
        return self._index.add(key, columns.num_rows, data.size, data)

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        payloads = self._index.payloads([read.ref for read in reads])
        return [decode_chunk(read.ref, data, read.names) for read, data in zip(reads, payloads, strict=True)]
