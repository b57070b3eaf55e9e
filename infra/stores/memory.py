"""A column store in this process, for tests and for code that runs without Ray."""

from collections.abc import Sequence

import pyarrow as pa

from infra.stores.base import ChunkRead, ColumnStore, decode_chunk
from infra.stores.chunk_index import ChunkIndex
from infra.stores.fence import same_content
from rl_core.columns.codec import decode, encode
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.store import StoreUsage


class MemoryStore(ColumnStore):
    """Holds encoded chunks in this process's memory. Not for several threads, so a full one never waits for room.

    Args:
        run_id: The run whose columns these are.
        capacity_bytes: The limit of all held chunks together.
        lease_seconds: How long a lease lasts that nobody renews.
        incarnation: The name of this incarnation; None makes a new one.
    """

    def __init__(
        self, run_id: str, capacity_bytes: int, lease_seconds: float = 3600, incarnation: str | None = None
    ) -> None:
        super().__init__(run_id)
        self._registry = ChunkIndex[pa.Buffer](capacity_bytes, lease_seconds, incarnation)
        self.incarnation = self._registry.incarnation

    def verify(self, batch: BatchHandle) -> None:
        self._registry.payloads(batch.chunks)

    def open_lease(self, step: int) -> None:
        self._registry.open_lease(step)

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        return self._registry.delete(refs)

    def clear(self, step: int) -> int:
        return self._registry.clear(step)

    def steps(self) -> list[int]:
        return self._registry.steps()

    def save_batch(self, batch: BatchHandle) -> None:
        self._registry.save_batch(batch.step, batch.model_dump_json())

    def load_batch(self, step: int) -> BatchHandle | None:
        saved = self._registry.load_batch(step)
        return None if saved is None else BatchHandle.model_validate_json(saved)

    def usage(self) -> StoreUsage:
        return self._registry.usage()

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        self._registry.require_lease(key)
        if held := self._registry.find(key):
            return same_content(held.ref, decode(held.payload), columns)
        data = pa.py_buffer(memoryview(encode(columns)).toreadonly())
        self._registry.reserve(key, data.size)
        return self._registry.commit(key, columns.num_rows, data.size, data)

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        payloads = self._registry.payloads([read.ref for read in reads])
        return [decode_chunk(read, data) for read, data in zip(reads, payloads, strict=True)]
