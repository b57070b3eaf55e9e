"""A column store in this process's memory, for tests and for code that runs without Ray."""

import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from infra.stores.base import ColumnStore
from infra.stores.chunk_index import ChunkIndex
from infra.stores.chunk_reads import ChunkRead, decode_chunk
from infra.stores.duplicates import check_same_content
from rl_core.columns.codec import decode, encode
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.store import StoreUsage


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
