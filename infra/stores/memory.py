"""A column store in this process, for tests and for code that runs without Ray."""

import pyarrow as pa

from infra.stores.base import ColumnStore
from infra.stores.registry import ChunkRegistry
from rl_core.columns.codec import decode
from schemas.batch import ChunkKey, ChunkRef
from schemas.step import StoreUsage


class _MemoryRegistry(ChunkRegistry[pa.Buffer]):
    def _hold(self, data: bytes) -> pa.Buffer:
        return pa.py_buffer(data)

    def _view(self, payload: pa.Buffer) -> pa.Buffer:
        return payload


class MemoryStore(ColumnStore):
    """Holds encoded chunks in this process's memory. Not for several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._registry = _MemoryRegistry(capacity_bytes)
        self.generation = self._registry.generation()

    def open_lease(self, run_id: str, step: int) -> None:
        self._registry.open_lease(run_id, step)

    def clear(self, run_id: str, step: int) -> int:
        return self._registry.clear(run_id, step)

    def usage(self) -> StoreUsage:
        return self._registry.usage()

    def _put(self, key: ChunkKey, num_rows: int, data: pa.Buffer) -> ChunkRef:
        return self._registry.put(key, num_rows, data.to_pybytes())

    def _fetch(self, refs: list[ChunkRef]) -> list[pa.RecordBatch]:
        return [decode(buffer) for buffer in self._registry.payloads(refs)]
