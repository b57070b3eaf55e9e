"""The column store of a replay: what it puts, over the columns of the run that it replays, which it only reads."""

import pyarrow as pa

from infra.stores.chunk_reads import ChunkRead
from infra.stores.fsspec import NO_EXPIRY_SECONDS, FsspecColumnStore
from schemas.batch import BatchHandle, ChunkKey, ChunkRef


class ReplayColumnStore(FsspecColumnStore):
    """A run's files, over another run's. A chunk belongs to the run whose store's incarnation its reference names.

    Args:
        run_id: The replay's own id, of which the chunks are that it puts.
        url: The folder of its own columns.
        source: The columns of the run that it replays, read-only.
    """

    def __init__(self, run_id: str, url: str, source: FsspecColumnStore) -> None:
        super().__init__(run_id, url, lease_seconds=NO_EXPIRY_SECONDS)
        self.source = source

    def verify(self, batch: BatchHandle) -> None:
        for ref in batch.chunks:
            self.read_chunk(ref)

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch:
        return self.source.read_chunk(ref) if self._is_of_source(ref) else super().read_chunk(ref)

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        own = super()._fetch
        return [(self.source._fetch if self._is_of_source(read.ref) else own)([read])[0] for read in reads]

    def _check_run(self, key: ChunkKey) -> None:
        if key.run_id != self.source.run_id:
            super()._check_run(key)

    def _is_of_source(self, ref: ChunkRef) -> bool:
        return ref.incarnation == self.source.incarnation
