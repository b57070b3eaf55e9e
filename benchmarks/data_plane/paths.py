"""The interface of a measured path, Sluice's path, and its lower bound: a memcpy."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from benchmarks.data_plane.batch import APPENDED, Ints, Packed, ReferenceBatch, valid_buffers
from infra.stores.shared.index import find_shared_store, start_shared_store
from infra.stores.shared.node_files import Limits
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import as_tensor, is_jagged, row_lengths
from rl_core.views import new_batch, select, with_column
from schemas.batch import BatchHandle, ChunkKey, ChunkRef

RUN_ID = "bench"
STAGE, APPEND_STAGE = "rollout", "reference"


class DataPath:
    """A way to move a batch from the producer's process to the consumer's, each of which has its own instance.

    Only a handle is sent from one to the other: it is small and picklable, and sending it is not timed. Of the
    operations, only `put`, `append`, `fetch` and `pack` are timed.
    """

    name: ClassVar[str]
    reads: ClassVar[bool] = True  # False: the path only writes
    num_bytes: int = 0  # stored by a put; set by `prepare` or the first put

    def prepare(self, batch: ReferenceBatch) -> None:
        """Create the container that the path's users hold, in the producer, before anything is timed."""

    def connect(self) -> None:
        """Connect the consumer to what the producer has prepared."""

    def open(self, step: int) -> None:
        """Prepare the producer for the puts of one step."""

    def put(self, step: int) -> Any:
        """Store the whole batch from the producer, and return its handle."""

    def extendable(self, handle: Any) -> Any:
        """Return the handle of the batch that `append` extends."""
        return handle

    def append(self, step: int, handle: Any) -> Any:
        """Store one more float32 response column from the producer, and return a handle that includes it."""

    def fetch(self, handle: Any, order: Ints | None) -> Any:
        """Return the batch's columns in the consumer's process, with rows in `order` if the path can read them so."""

    def pack(self, fetched: Any, order: Ints | None) -> Any:
        """Return what the consumer fetched as packed tensors, with rows in `order`."""

    def fetch_appended(self, handle: Any) -> Any:
        """Return the appended column in the consumer's process, to verify it."""

    def clear(self, step: int, handle: Any) -> None:
        """Free what the producer stored for the step; Ray frees its own objects once no handle is left."""

    def close(self) -> None:
        """Stop what the producer's path started."""


class Sluice(DataPath):
    """Sluice's column store, including its index, schema checks, write fence and handle."""

    name = "sluice"
    capacity_bytes: ClassVar[int] = 2**31

    def prepare(self, batch: ReferenceBatch) -> None:
        self._batch = batch
        self._dtypes = value_dtypes(batch.columns)
        self._store = start_shared_store(RUN_ID, Limits(self.capacity_bytes, 60, None))

    def connect(self) -> None:
        self._store = find_shared_store(RUN_ID)

    def open(self, step: int) -> None:
        self._store.open(step)

    def put(self, step: int) -> BatchHandle:
        ref = self._store.put(ChunkKey(run_id=RUN_ID, step=step, stage=STAGE), self._batch.columns)
        self.num_bytes = ref.num_bytes
        return self._handle(step, ref, self._dtypes)

    def extendable(self, handle: BatchHandle) -> BatchHandle:
        # The catalog has no fourth log-prob column, so the batch that is extended leaves out its third.
        (chunk,) = handle.groups[0].chunks
        return self._handle(handle.step, chunk, {name: self._dtypes[name] for name in self._dtypes if name != APPENDED})

    def append(self, step: int, handle: BatchHandle) -> BatchHandle:
        key = ChunkKey(run_id=RUN_ID, step=step, stage=APPEND_STAGE)
        ref = self._store.put(key, self._batch.appended, handle)
        return with_column(handle, value_dtypes(self._batch.appended), [ref], np.arange(handle.num_rows))

    def fetch(self, handle: BatchHandle, order: Ints | None) -> pa.RecordBatch:
        batch = handle if order is None else select(handle, order)
        return self._store.read(batch, batch.columns)

    def pack(self, fetched: pa.RecordBatch, order: Ints | None) -> Packed:
        return pack_arrow(fetched)

    def fetch_appended(self, handle: BatchHandle) -> Packed:
        return pack_arrow(self._store.read(handle, [APPENDED]))

    def clear(self, step: int, handle: BatchHandle) -> None:
        self._store.clear(step)

    def close(self) -> None:
        self._store.close()

    def _handle(self, step: int, chunk: ChunkRef, dtypes: dict[str, str]) -> BatchHandle:
        lengths = self._batch.prompt_lengths, self._batch.response_lengths
        return new_batch(RUN_ID, step, 0, [chunk], dtypes, *lengths)


class Memcpy(DataPath):
    """One copy of the valid bytes into preallocated, warm memory: nothing can be faster."""

    name = "memcpy"
    reads = False

    def prepare(self, batch: ReferenceBatch) -> None:
        self._sources = valid_buffers(batch.columns)
        self._appended = valid_buffers(batch.appended)
        self.num_bytes = sum(source.size for source in self._sources)
        self._target = np.ones(self.num_bytes, np.uint8)  # ones, so that every page is mapped

    def put(self, step: int) -> None:
        self._copy(self._sources)

    def append(self, step: int, handle: None) -> None:
        self._copy(self._appended)

    def is_copied(self) -> bool:
        """Return whether the target holds the batch, after a put."""
        return bool(np.array_equal(self._target, np.concatenate(self._sources)))

    def _copy(self, sources: Sequence[np.ndarray]) -> None:
        start = 0
        for source in sources:
            np.copyto(self._target[start : start + source.size], source)
            start += source.size


def pack_arrow(columns: pa.RecordBatch) -> Packed:
    """Return jagged Arrow columns as tensors; they are packed already."""
    tokens: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    rows: dict[str, torch.Tensor] = {}
    strings: dict[str, Sequence[Any]] = {}
    for name, column in zip(columns.schema.names, columns.columns, strict=True):
        if is_jagged(column):
            tokens[name] = (as_tensor(column), torch.from_numpy(row_lengths(column)))
        elif pa.types.is_string(column.type):
            strings[name] = column
        else:
            rows[name] = as_tensor(column)
    return Packed(tokens, rows, strings)
