"""The books of one store: which chunks it holds, under which leases, in how many bytes."""

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from rl_core.columns.codec import decode
from schemas.batch import ChunkKey, ChunkRef, step_prefix
from schemas.errors import CapacityError, ChunkNotFoundError, DuplicateChunkError, LeaseError
from schemas.step import StoreUsage

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class _Entry(Generic[Payload]):
    ref: ChunkRef
    payload: Payload


class ChunkRegistry(ABC, Generic[Payload]):
    """One store's chunks, by key. A backend says what a payload is: where a chunk's bytes are held."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._generation = uuid.uuid4().hex
        self._entries: dict[str, _Entry[Payload]] = {}
        self._leases: set[str] = set()
        self._num_bytes = 0
        self._peak_bytes = 0

    @abstractmethod
    def _hold(self, data: bytes) -> Payload:
        """Take ownership of a chunk's bytes; raises CapacityError where there is no room."""

    @abstractmethod
    def _view(self, payload: Payload) -> pa.Buffer:
        """The bytes of a held chunk, not copied."""

    def generation(self) -> str:
        """The name of this incarnation."""
        return self._generation

    def open_lease(self, run_id: str, step: int) -> None:
        """See `ColumnStore.open_lease`."""
        self._leases.add(step_prefix(run_id, step))

    def put(self, key: ChunkKey, num_rows: int, data: bytes) -> ChunkRef:
        """See `ColumnStore.put`; `data` is an encoded chunk."""
        if step_prefix(key.run_id, key.step) not in self._leases:
            raise LeaseError(
                f"can't put {key}: step {key.step} has no open lease; open it first, or the step was cleared already"
            )
        name = str(key)
        if held := self._entries.get(name):
            if not _same_content(self._view(held.payload), pa.py_buffer(data)):
                raise DuplicateChunkError(
                    f"chunk {name} is already held with other content ({held.ref.num_rows} rows, "
                    f"{held.ref.num_bytes} bytes; now {num_rows} rows, {len(data)} bytes): "
                    "a chunk has one writer, and a retry must produce the same"
                )
            return held.ref
        if self._num_bytes + len(data) > self._capacity_bytes:
            raise CapacityError(
                f"can't put {name}: {len(data)} bytes asked, {self._num_bytes} held, "
                f"limit {self._capacity_bytes}; raise store.capacity_bytes or make the step smaller"
            )
        ref = ChunkRef(key=name, num_rows=num_rows, num_bytes=len(data), generation=self._generation)
        self._entries[name] = _Entry(ref, self._hold(data))
        self._num_bytes += ref.num_bytes
        self._peak_bytes = max(self._peak_bytes, self._num_bytes)
        return ref

    def payloads(self, refs: list[ChunkRef]) -> list[Payload]:
        """Where the chunks' bytes are, in order.

        Raises:
            ChunkNotFoundError: A chunk was never put, was cleared, or was put into another incarnation.
        """
        return [self._find(ref).payload for ref in refs]

    def clear(self, run_id: str, step: int) -> int:
        """See `ColumnStore.clear`."""
        prefix = step_prefix(run_id, step)
        self._leases.discard(prefix)
        freed = 0
        for name in [name for name in self._entries if name.startswith(prefix)]:
            freed += self._entries.pop(name).ref.num_bytes
        self._num_bytes -= freed
        return freed

    def usage(self) -> StoreUsage:
        """See `ColumnStore.usage`."""
        return StoreUsage(
            num_chunks=len(self._entries),
            num_rows=sum(entry.ref.num_rows for entry in self._entries.values()),
            num_bytes=self._num_bytes,
            peak_bytes=self._peak_bytes,
            capacity_bytes=self._capacity_bytes,
            open_leases=tuple(sorted(lease.rstrip("/") for lease in self._leases)),
        )

    def _find(self, ref: ChunkRef) -> _Entry[Payload]:
        if ref.generation != self._generation:
            raise ChunkNotFoundError(
                f"chunk {ref.key} was put into store {ref.generation}, which is gone; "
                f"this is {self._generation}: run the stage that produces it again"
            )
        if ref.key not in self._entries:
            raise ChunkNotFoundError(f"chunk {ref.key} is not in the store: its step was cleared, or it was never put")
        return self._entries[ref.key]


def _same_content(held: pa.Buffer, data: pa.Buffer) -> bool:
    # Equal columns may differ in bytes that nobody reads: padding, or what lies under a null.
    return bool(held.equals(data) or decode(held).equals(decode(data)))
