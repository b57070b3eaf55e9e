"""What a measured path is; the product's own; and the two floors below it: bare Arrow bytes, and a memcpy."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import ray
import torch

from benchmarks.data_plane.batch import APPENDED, Ints, Packed, ReferenceBatch, valid_buffers
from infra.stores.ray import RayColumnStore
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import as_tensor, is_jagged, row_lengths
from rl_core.views import new_batch, permute, with_column
from schemas.batch import BatchHandle, ChunkKey, ChunkRef

Refs = dict[str, "ray.ObjectRef[Any]"]

RUN_ID = "bench"
STAGE, APPEND_STAGE = "rollout", "reference"


class DataPath:
    """One way from a producer's process to a consumer's. Each process makes its own.

    A handle is what travels between them: small, picklable, and not timed on its way. Of the operations, only
    `put`, `append`, `fetch` and `pack` are timed.
    """

    name: ClassVar[str]
    reads: ClassVar[bool] = True  # False: the path only writes
    num_bytes: int = 0  # of what a put stores; set by `prepare`

    def prepare(self, batch: ReferenceBatch) -> None:
        """Producer: make the container that the path's users hold, before anything is timed."""
        raise NotImplementedError

    def connect(self) -> None:
        """Consumer: join what the producer has prepared."""

    def open(self, step: int) -> None:
        """Producer: get ready for the puts of one step."""

    def put(self, step: int) -> Any:
        """Producer: store the whole batch and return its handle."""
        raise NotImplementedError

    def extendable(self, handle: Any) -> Any:
        """The handle of the batch that `append` extends."""
        return handle

    def append(self, step: int, handle: Any) -> Any:
        """Producer: store one more float32 response column and return the handle that has it."""
        raise NotImplementedError

    def fetch(self, handle: Any, order: Ints | None) -> Any:
        """Consumer: the batch's columns in this process; rows in `order` where the path can ask for that."""
        raise NotImplementedError

    def pack(self, fetched: Any, order: Ints | None) -> Packed:
        """Consumer: the packed tensors of what was fetched, rows in `order`."""
        raise NotImplementedError

    def fetch_appended(self, handle: Any) -> Packed:
        """Consumer: the appended column, to check it."""
        raise NotImplementedError

    def clear(self, step: int, handle: Any) -> None:
        """Producer: free what the step stored; Ray frees its objects by itself once no handle is left."""

    def close(self) -> None:
        """Producer: end what the path started."""


class Sluice(DataPath):
    """The product: registry, schema checks, write fence, lease and handle included."""

    name = "sluice"
    capacity_bytes: ClassVar[int] = 2**31

    def prepare(self, batch: ReferenceBatch) -> None:
        self._batch = batch
        self._dtypes = value_dtypes(batch.columns)
        self._store = RayColumnStore(RUN_ID, self.capacity_bytes)

    def connect(self) -> None:
        self._store = RayColumnStore(RUN_ID)

    def open(self, step: int) -> None:
        self._store.open_lease(step)

    def put(self, step: int) -> BatchHandle:
        ref = self._store.put(ChunkKey(run_id=RUN_ID, step=step, stage=STAGE), self._batch.columns)
        self.num_bytes = ref.num_bytes
        return self._handle(step, ref, self._dtypes)

    def extendable(self, handle: BatchHandle) -> BatchHandle:
        # The catalogue has no fourth log-prob column, so the extended batch is one that does not name its third.
        (chunk,) = handle.groups[0].chunks
        return self._handle(handle.step, chunk, {name: self._dtypes[name] for name in self._dtypes if name != APPENDED})

    def append(self, step: int, handle: BatchHandle) -> BatchHandle:
        key = ChunkKey(run_id=RUN_ID, step=step, stage=APPEND_STAGE)
        ref = self._store.put(key, self._batch.appended, handle)
        return with_column(handle, value_dtypes(self._batch.appended), [ref], np.arange(handle.num_rows))

    def fetch(self, handle: BatchHandle, order: Ints | None) -> pa.RecordBatch:
        batch = handle if order is None else permute(handle, order)
        return self._store.read(batch, batch.columns)

    def pack(self, fetched: pa.RecordBatch, order: Ints | None) -> Packed:
        return pack_arrow(fetched)

    def fetch_appended(self, handle: BatchHandle) -> Packed:
        return pack_arrow(self._store.read(handle, [APPENDED]))

    def clear(self, step: int, handle: BatchHandle) -> None:
        self._store.clear(step)

    def close(self) -> None:
        self._store.close()

    def call_registry(self) -> None:
        """An empty round trip."""
        self._store.steps()

    def _handle(self, step: int, chunk: ChunkRef, dtypes: dict[str, str]) -> BatchHandle:
        lengths = self._batch.prompt_lengths, self._batch.response_lengths
        return new_batch(RUN_ID, step, 0, [chunk], dtypes, *lengths)


class ArrowIpcPlasma(DataPath):
    """Bare Arrow IPC bytes in Ray's object store, through Ray's public API: no names, no checks, no owner."""

    name = "arrow_ipc_plasma"

    def prepare(self, batch: ReferenceBatch) -> None:
        self._batch = batch

    def put(self, step: int) -> Refs:
        data = _ipc_bytes(self._batch.columns)
        self.num_bytes = data.size
        return {"columns": ray.put(data)}

    def append(self, step: int, handle: Refs) -> Refs:
        return {**handle, "appended": ray.put(_ipc_bytes(self._batch.appended))}

    def fetch(self, handle: Refs, order: Ints | None) -> pa.RecordBatch:
        columns = _open_ipc(ray.get(handle["columns"]))
        return columns if order is None else columns.take(pa.array(order))

    def pack(self, fetched: pa.RecordBatch, order: Ints | None) -> Packed:
        return pack_arrow(fetched)

    def fetch_appended(self, handle: Refs) -> Packed:
        return pack_arrow(_open_ipc(ray.get(handle["appended"])))


class Memcpy(DataPath):
    """The valid bytes, copied once into memory that is there and warm: nothing can be faster."""

    name = "memcpy"
    reads = False

    def prepare(self, batch: ReferenceBatch) -> None:
        self._sources = valid_buffers(batch.columns)
        self._appended = valid_buffers(batch.appended)
        self.num_bytes = sum(source.size for source in self._sources)
        self._target = np.ones(self.num_bytes, np.uint8)  # ones, so that every page is there

    def put(self, step: int) -> None:
        self._copy(self._sources)

    def append(self, step: int, handle: None) -> None:
        self._copy(self._appended)

    def is_copied(self) -> bool:
        """Whether the target holds the batch, after a put."""
        return bool(np.array_equal(self._target, np.concatenate(self._sources)))

    def _copy(self, sources: Sequence[np.ndarray]) -> None:
        start = 0
        for source in sources:
            np.copyto(self._target[start : start + source.size], source)
            start += source.size


def pack_arrow(columns: pa.RecordBatch) -> Packed:
    """The tensors of jagged Arrow columns: they are packed already."""
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


def _ipc_bytes(columns: pa.RecordBatch) -> pa.Buffer:
    # Into a buffer of the right size: one that grows copies what it has.
    counter = pa.MockOutputStream()
    _write_ipc(columns, counter)
    buffer = pa.allocate_buffer(counter.size())
    _write_ipc(columns, pa.FixedSizeBufferWriter(buffer))
    return buffer


def _write_ipc(columns: pa.RecordBatch, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, columns.schema) as writer:
        writer.write_batch(columns)


def _open_ipc(data: pa.Buffer) -> pa.RecordBatch:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_next_batch()
