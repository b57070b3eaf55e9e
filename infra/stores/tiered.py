"""Two stores as one: a fast front store for puts and reads, and a durable store behind it."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from infra.stores.base import ColumnStore
from infra.stores.chunk_reads import ChunkRead
from infra.stores.files import FsspecColumnStore
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, StoreUsage
from schemas.errors import ChunkNotFoundError, StoreError

_WRITE_THREADS = 2

logger = logging.getLogger(__name__)


class TieredColumnStore(ColumnStore):
    """A write-behind store: a put returns when the front holds the chunk; `flush` waits for the durable write.

    A chunk that the front has lost is read from the durable store. The front enforces open steps, capacity
    and the single-writer rule.

    Args:
        front: The store that is read first. Its incarnation must be the durable one's, so that handles outlive it.
        durable: The store that outlives the front.
    """

    def __init__(self, front: ColumnStore, durable: FsspecColumnStore) -> None:
        super().__init__(front.run_id)
        if front.incarnation != durable.incarnation:
            raise StoreError(
                f"the front store of run {front.run_id} is of incarnation {front.incarnation}, expected "
                f"{durable.incarnation}, that of the durable store: they don't belong together"
            )
        self.incarnation = durable.incarnation
        self.front, self.durable = front, durable
        self._pool = ThreadPoolExecutor(_WRITE_THREADS, thread_name_prefix="write-behind")
        self._pending: list[tuple[ChunkKey, Future[ChunkRef]]] = []

    def open(self, step: int) -> None:
        self.durable.open(step)
        self.front.open(step)

    def verify(self, batch: BatchHandle) -> None:
        self.durable.verify(batch)

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
        self.durable.delete(refs)
        return self.front.delete(refs)

    def clear(self, step: int) -> int:
        self._abandon(lambda pending: pending == step)
        freed = self.front.clear(step)
        durable = self.durable.clear(step)
        return freed or durable

    def archive(self, step: int) -> None:
        self.front.clear(step)
        self.durable.archive(step)

    def drop_leftovers(self, step: int) -> None:
        self.durable.drop_leftovers(step)

    def steps(self) -> list[int]:
        return sorted({*self.front.steps(), *self.durable.steps()})

    def bytes_by_step(self) -> dict[int, int]:
        return self.durable.bytes_by_step()

    def chunks(self, step: int) -> list[ChunkRef]:
        return list(dict.fromkeys([*self.front.chunks(step), *self.durable.chunks(step)]))

    def save_batch(self, batch: BatchHandle) -> None:
        self.durable.save_batch(batch)

    def load_batch(self, step: int) -> BatchHandle | None:
        return self.durable.load_batch(step)

    def usage(self) -> StoreUsage:
        return self.front.usage()

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        ref = self.front._put(key, columns)
        self._abandon(lambda step: step != key.step)  # cleared by another process
        self._pending.append((key, self._pool.submit(self.durable._put, key, columns)))
        return ref

    def _abandon(self, is_abandoned: Callable[[int], bool]) -> None:
        """Drop the pending writes of such steps, whose stages failed without a flush: none is written after that."""
        abandoned = [(key, written) for key, written in self._pending if is_abandoned(key.step)]
        self._pending = [(key, written) for key, written in self._pending if not is_abandoned(key.step)]
        for key, written in [(key, written) for key, written in abandoned if not written.cancel()]:
            if error := written.exception():  # waits for what is being written
                logger.info("chunk %s was abandoned before it was durable: %s", key, error)

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        try:
            return self.front._fetch(reads)
        except ChunkNotFoundError:
            return [self._fetch_one(read) for read in reads]

    def _fetch_one(self, read: ChunkRead) -> pa.RecordBatch:
        try:
            return self.front._fetch([read])[0]
        except ChunkNotFoundError as error:
            found = self.durable._fetch([read])[0]
            logger.info("read chunk %s from the durable store: %s", read.ref.key, error)
            return found
