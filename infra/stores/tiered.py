"""Two stores as one: a fast one in front, where puts and reads happen, and a durable one behind it."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from infra.stores.base import ChunkRead, ColumnStore
from infra.stores.fsspec import FsspecColumnStore
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.errors import ChunkNotFoundError, StoreError
from schemas.store import StoreUsage

_WRITERS = 2

logger = logging.getLogger(__name__)


class TieredColumnStore(ColumnStore):
    """Puts return when the front holds the chunk; it is written behind meanwhile, until `flush` says it is there.

    A chunk that the front has lost is read from behind. Leases, capacity and the fence are the front's: what its sweep
    frees stays readable from behind, until the step is cleared.

    Args:
        front: The store that is read first. Its incarnation must be the durable one's, so that handles outlive it.
        behind: The store that outlives it.
    """

    def __init__(self, front: ColumnStore, behind: FsspecColumnStore) -> None:
        super().__init__(front.run_id)
        if front.incarnation != behind.incarnation:
            raise StoreError(
                f"the front store of run {front.run_id} is of incarnation {front.incarnation}, expected "
                f"{behind.incarnation}, as the durable one: they don't belong together"
            )
        self.incarnation = behind.incarnation
        self.front, self.behind = front, behind
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="write-behind")
        self._pending: list[tuple[ChunkKey, Future[ChunkRef]]] = []

    def open_lease(self, step: int) -> None:
        self.behind.open_lease(step)
        self.front.open_lease(step)

    def verify(self, batch: BatchHandle) -> None:
        self.behind.verify(batch)

    def close(self) -> None:
        self.front.close()

    def flush(self) -> None:
        """See `ColumnStore.flush`: the barrier before a handle of these chunks is committed anywhere."""
        self.front.flush()
        pending, self._pending = self._pending, []
        for key, written in pending:
            try:
                written.result()
            except (StoreError, OSError) as error:
                raise StoreError(f"chunk {key} is not durable: {error}; run its stage again") from error

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        self.flush()
        self.behind.delete(refs)
        return self.front.delete(refs)

    def clear(self, step: int) -> int:
        freed = self.front.clear(step)
        behind = self.behind.clear(step)
        return freed or behind

    def archive(self, step: int) -> None:
        self.front.clear(step)
        self.behind.archive(step)

    def steps(self) -> list[int]:
        return sorted({*self.front.steps(), *self.behind.steps()})

    def save_batch(self, batch: BatchHandle) -> None:
        self.behind.save_batch(batch)

    def load_batch(self, step: int) -> BatchHandle | None:
        return self.behind.load_batch(step)

    def usage(self) -> StoreUsage:
        return self.front.usage()

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        ref = self.front._put(key, columns)
        self._drop_abandoned(key.step)
        self._pending.append((key, self._pool.submit(self.behind._put, key, columns)))
        return ref

    def _drop_abandoned(self, step: int) -> None:
        """Forget what was put for other steps and never flushed: their stage failed, and they were cleared."""
        for other, written in self._pending:
            if other.step != step and written.done() and (error := written.exception()):
                logger.info("chunk %s was abandoned before it was durable: %s", other, error)
        self._pending = [(other, written) for other, written in self._pending if other.step == step]

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        try:
            return self.front._fetch(reads)
        except ChunkNotFoundError:
            return [self._fetch_one(read) for read in reads]

    def _fetch_one(self, read: ChunkRead) -> pa.RecordBatch:
        try:
            return self.front._fetch([read])[0]
        except ChunkNotFoundError as error:
            found = self.behind._fetch([read])[0]
            logger.info("read %s from the durable tier: %s", read.ref.key, error)
            return found
