"""The contract of every column store; `tests/contracts` holds each backend to it.

N rows of a batch.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa

from infra.stores.chunk_reads import BatchRead, ChunkRead
from infra.stores.prometheus import record_traffic
from rl_core.columns.codec import check_row_lengths, encode, validate
from rl_core.columns.gather import Ints
from rl_core.views import decode_ints
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, StoreTraffic, StoreUsage
from schemas.catalog import Axis, column_spec
from schemas.errors import (
    CapacityError,
    ChunkNotFoundError,
    ColumnError,
    ColumnNotFoundError,
    DuplicateChunkError,
    InvalidKeyError,
    StaleIncarnationError,
    StepNotOpenError,
    WorkerLostError,
)


class ColumnStore(ABC):
    """Chunks of one run's columns under string keys, put while their step is open.

    The store owns the bytes: they outlive the process that put them, and are freed when the step is cleared, which is
    the driver's part. What a read returns is immutable, and stays valid after the step is cleared for as long as it is
    referenced.

    Args:
        run_id: The run whose columns these are; keys of another run are rejected.
    """

    incarnation: str  # a reference from another incarnation of the store is never served
    bytes_read: ClassVar[int] = 0  # bytes of the columns that reads in this process returned, mapped or copied

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._traffic = StoreTraffic()

    @abstractmethod
    def open(self, step: int) -> None:
        """Allow puts for this step until it is cleared or archived; opening it again drops no chunk."""

    def put(self, key: ChunkKey, columns: pa.RecordBatch, batch: BatchHandle | None = None) -> ChunkRef:
        """Store N rows of columns under `key`. A repeated put of equal content returns the same reference.

        Args:
            key: The chunk's deterministic name.
            columns: Columns exactly as the catalog declares them; nothing is converted.
            batch: The N rows that these columns extend, if they exist already; jagged columns must have their
                lengths.

        Raises:
            ColumnError: A column is not as declared, or does not have the batch's rows.
            InvalidKeyError: The key belongs to another run.
            StepNotOpenError: The step is not open.
            DuplicateChunkError: Other content is stored under the key.
            CapacityError: The store would exceed its capacity, and none was freed in time.
        """
        started = time.perf_counter()
        self._check_run(key)
        try:
            if batch is not None and batch.num_rows != columns.num_rows:
                raise ColumnError(f"there are {columns.num_rows} rows, expected the batch's {batch.num_rows}")
            validate(columns, None if batch is None else _lengths(batch))
        except ColumnError as error:
            raise ColumnError(f"can't put {key}: {error}") from None
        ref = self._put(key, columns)
        self._traffic += StoreTraffic(num_puts=1, put_bytes=ref.num_bytes, put_seconds=time.perf_counter() - started)
        return ref

    def read(self, batch: BatchHandle, columns: Sequence[str]) -> pa.RecordBatch:
        """Read the named columns of exactly the batch's N rows, in its order.

        If a column's rows are one range of one chunk, the result is a view of the stored bytes; otherwise these rows,
        and no others, are copied once.

        Raises:
            ColumnNotFoundError: A column has not been produced.
            ChunkNotFoundError: A chunk was cleared, or was in a store that is lost.
            ChunkCorruptedError: A chunk's stored bytes are damaged.
            ColumnError: Stored columns are not what the handle says.
            ValueError: No column is named, or one is named twice.
        """
        started = time.perf_counter()
        if not columns or len(set(columns)) != len(columns):
            raise ValueError(f"a read must name at least one column, and each only once, got {list(columns)}")
        missing = [name for name in columns if name not in batch.columns]
        if missing:
            raise ColumnNotFoundError(
                f"step {batch.step} has no column {missing[0]!r}; produced so far: {', '.join(batch.columns)}"
            )
        arrays = self._read_arrays(BatchRead(batch, frozenset(columns)))
        lengths = _lengths(batch)
        for name in columns:
            if (axis := column_spec(name).axis) in lengths:
                check_row_lengths(name, arrays[name], lengths[axis])
        result = pa.RecordBatch.from_arrays([arrays[name] for name in columns], names=list(columns))
        ColumnStore.bytes_read += result.nbytes
        self._traffic += StoreTraffic(num_reads=1, read_bytes=result.nbytes, read_seconds=time.perf_counter() - started)
        return result

    @abstractmethod
    def delete(self, refs: Sequence[ChunkRef]) -> int:
        """Delete chunks; return the bytes freed, 0 if they were deleted before."""

    @abstractmethod
    def clear(self, step: int) -> int:
        """Delete the step's chunks and close it; return the bytes freed, 0 if it was cleared before."""

    def archive(self, step: int) -> None:
        """Close the step; a durable store keeps its chunks readable until the step is cleared."""
        self.clear(step)

    def drop_leftovers(self, step: int) -> None:  # noqa: B027  not abstract: memory keeps nothing of killed writers
        """Remove what killed writers have left of an archived step to which nothing is written any more.

        Raises:
            ChunkCorruptedError: A record is damaged; nothing was removed.
        """

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps that the store holds anything of, archived ones included, in order."""

    def open_steps(self) -> list[int]:
        """Return the steps that are open, in order."""
        return list(self.usage().open_steps)

    def bytes_by_step(self) -> dict[int, int]:
        """Return the bytes of each step's durable chunks; nothing if the store is not durable."""
        return {}

    @abstractmethod
    def chunks(self, step: int) -> list[ChunkRef]:
        """Return all chunks that the store holds of a step, in any order, whether or not a handle refers to them."""

    @abstractmethod
    def save_batch(self, batch: BatchHandle) -> None:
        """Save the step's newest handle, for tools that read its columns; it is dropped with the step."""

    @abstractmethod
    def load_batch(self, step: int) -> BatchHandle | None:
        """Return the handle that was saved last; None if there is none."""

    @abstractmethod
    def usage(self) -> StoreUsage:
        """Return what the store holds of open steps, for all of its clients."""

    @abstractmethod
    def verify(self, batch: BatchHandle) -> None:
        """Check that all chunks of a batch exist, and are undamaged if the store keeps checksums.

        Raises:
            ChunkNotFoundError: A chunk does not exist.
            ChunkCorruptedError: A chunk is damaged.
        """

    def close(self) -> None:  # noqa: B027  not abstract: files need no closing
        """Close the store at the end of its run: what it holds of open steps may be lost."""

    def flush(self) -> None:  # noqa: B027  not abstract: most puts are as durable as they get when they return
        """Wait until everything that this client has put is as durable as the store makes it.

        Raises:
            StoreError: A chunk could not be made durable.
        """

    def take_traffic(self, stage: str) -> StoreTraffic:
        """Return this client's traffic since the last call, and add it to Ray's metrics under `stage`."""
        traffic, self._traffic = self._traffic, StoreTraffic()
        record_traffic(self.run_id, stage, traffic)
        return traffic

    @abstractmethod
    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        """Store valid columns, with the errors of `put`."""

    @abstractmethod
    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        """Return the columns of each read, decoded without a copy; rows outside its ranges may hold anything."""

    def _check_run(self, key: ChunkKey) -> None:
        if key.run_id != self.run_id:
            raise InvalidKeyError(f"chunk {key} is of run {key.run_id}, expected {self.run_id}, whose store this is")

    def _read_arrays(self, read: BatchRead) -> dict[str, pa.Array]:
        reads = read.chunk_reads()
        for chunk in reads:
            self._check_run(ChunkKey.parse(chunk.ref.key))
        fetched = self._fetch(reads) if reads else []
        return read.assemble(dict(zip([chunk.ref for chunk in reads], fetched, strict=True)))


def _lengths(batch: BatchHandle) -> dict[Axis, Ints]:
    return {"prompt": decode_ints(batch.prompt_lengths), "response": decode_ints(batch.response_lengths)}


def check_incarnation(ref: ChunkRef, incarnation: str) -> None:
    """Check that a reference is of this incarnation of the store.

    Raises:
        StaleIncarnationError: It is of another one.
    """
    if ref.incarnation != incarnation:
        raise StaleIncarnationError(
            f"chunk {ref.key} belongs to a previous store ({ref.incarnation}; this is {incarnation}); Ray was probably "
            "restarted: run the stage that produces it again"
        )


def chunk_not_found_error(ref: ChunkRef) -> ChunkNotFoundError:
    """Return the error for a chunk that is not in the store."""
    return ChunkNotFoundError(f"chunk {ref.key} is not in the store: its step was cleared, or it was never put")


def step_not_open_error(key: ChunkKey) -> StepNotOpenError:
    """Return the error for a put into a step that is not open."""
    return StepNotOpenError(f"can't put {key}: step {key.step} is not open; open it first (it may have been cleared)")


def capacity_error(key: ChunkKey, requested: int, held: int, limit: int) -> CapacityError:
    """Return the error for a put that would exceed the store's capacity."""
    return CapacityError(
        f"can't put {key}: {requested} bytes requested, {held} held, limit {limit}; "
        "raise store.capacity_bytes, and resume the run"
    )


def lost_store_error(run_id: str, error: Exception) -> WorkerLostError:
    """Return the error for a store whose index can't be reached."""
    return WorkerLostError(f"the column store of run {run_id} is gone, with the columns that it held: {error}")


def check_same_content(ref: ChunkRef, held: pa.RecordBatch, columns: pa.RecordBatch) -> ChunkRef:
    """Check that a put repeats what is stored under its key; return the stored chunk's reference.

    Equal columns may differ in bytes without meaning, such as padding and values under a null, so values are compared.

    Raises:
        DuplicateChunkError: The stored content differs.
    """
    if held.equals(columns) or encode(held).equals(encode(columns)):  # NaNs are equal only as bytes
        return ref
    raise DuplicateChunkError(
        f"chunk {ref.key} is already stored with other content: {_difference(held, columns)}; "
        "a chunk has one writer, and a retry must produce the same content"
    )


def _difference(held: pa.RecordBatch, columns: pa.RecordBatch) -> str:
    if held.schema.names != columns.schema.names:
        return f"columns {', '.join(held.schema.names)}, now {', '.join(columns.schema.names)}"
    if held.num_rows != columns.num_rows:
        return f"{held.num_rows} rows, now {columns.num_rows}"
    for name in held.schema.names:
        before, now = held.column(name), columns.column(name)
        if before.type != now.type:
            return f"column {name!r} is {before.type}, now {now.type}"
        row = next((row for row in range(len(now)) if not before.slice(row, 1).equals(now.slice(row, 1))), None)
        if row is not None:
            return f"column {name!r} first differs in row {row} of {len(now)}"
    return "bytes under nulls or NaNs"
