"""What every column store promises; `tests/contracts` holds each backend to it.

N rows of a batch, P row ranges that make them up.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from infra.stores.prometheus import count_traffic
from rl_core.columns.codec import arrow_type, check_row_lengths, decode, validate, value_dtypes
from rl_core.columns.gather import Gather, Ints
from rl_core.views import ReadPlan, decode_ints, read_plan, with_column
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, ColumnGroup
from schemas.catalog import Axis, column_spec
from schemas.errors import (
    ChunkCorruptedError,
    ColumnError,
    ColumnNotFoundError,
    InvalidKeyError,
    StoreError,
)
from schemas.store import StoreTraffic, StoreUsage


@dataclass(frozen=True, eq=False)
class ChunkRead:
    """What a read wants of one chunk: some columns, and of these some rows."""

    ref: ChunkRef
    names: frozenset[str]
    starts: Ints  # of row ranges, [P], in no order
    stops: Ints  # [P]

    def joined(self, other: "ChunkRead") -> "ChunkRead":
        """This and another read of the same chunk."""
        starts, stops = np.concatenate([self.starts, other.starts]), np.concatenate([self.stops, other.stops])
        return ChunkRead(self.ref, self.names | other.names, starts, stops)


class ColumnStore(ABC):
    """Chunks of one run's columns under string keys, one lease per step.

    The store owns the bytes: they outlive the process that put them, and go when the step is cleared. What a
    read returns is immutable, and stays valid after the step is cleared for as long as it is referenced.

    Args:
        run_id: The run whose columns these are; keys of another one are refused.
    """

    incarnation: str  # this incarnation of the store; a handle of another one is never served
    bytes_read: ClassVar[int] = 0  # bytes of the columns that reads returned in this process, mapped or copied

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._traffic = StoreTraffic()

    @abstractmethod
    def open_lease(self, step: int) -> None:
        """Allow puts of this step, and renew the time it may last.

        Opening again drops nothing that is held. Puts and reads renew the lease too; one that nobody renews
        expires, and a sweep frees its chunks.
        """

    def put(self, key: ChunkKey, columns: pa.RecordBatch, batch: BatchHandle | None = None) -> ChunkRef:
        """Store N rows of columns under `key`. A repeated put of equal content returns the same reference.

        Args:
            key: The chunk's deterministic name.
            columns: What the catalogue declares, exactly; nothing is converted.
            batch: The N rows that these columns extend, where there are any already; jagged columns must have
                their lengths.

        Raises:
            ColumnError: A column is not as declared, or its rows are not the batch's.
            InvalidKeyError: The key is of another run.
            LeaseError: The step's lease is not open, or has expired.
            DuplicateChunkError: The key holds other content.
            CapacityError: The store would hold more bytes than it may, and has waited in vain for room.
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

        Where a column's rows are one range of one chunk, the result is a view of the stored bytes; otherwise
        they are copied once, and no other rows.

        Raises:
            ColumnNotFoundError: A column has not been produced.
            ChunkNotFoundError: A chunk was cleared, or belongs to a lost store.
            ChunkCorruptedError: A chunk's stored bytes are damaged.
            ColumnError: Stored columns are not what the handle says.
            ValueError: No column is named, or one twice.
        """
        started = time.perf_counter()
        if not columns or len(set(columns)) != len(columns):
            raise ValueError(f"a read names each column it wants once, got {list(columns)}")
        missing = [name for name in columns if name not in batch.columns]
        if missing:
            raise ColumnNotFoundError(
                f"step {batch.step} has no column {missing[0]!r}; produced so far: {', '.join(batch.columns)}"
            )
        arrays = self._gather(batch, frozenset(columns))
        lengths = _lengths(batch)
        for name in columns:
            if (axis := column_spec(name).axis) != "row":
                check_row_lengths(name, arrays[name], lengths[axis])
        result = pa.RecordBatch.from_arrays([arrays[name] for name in columns], names=list(columns))
        ColumnStore.bytes_read += result.nbytes
        self._traffic += StoreTraffic(num_reads=1, read_bytes=result.nbytes, read_seconds=time.perf_counter() - started)
        return result

    def compact(self, batch: BatchHandle, key: ChunkKey) -> BatchHandle:
        """Copy the batch's N rows into one new chunk: a small view then no longer needs large chunks.

        The old chunks stay until they are deleted or the step is cleared.

        Raises:
            StoreError: As `read` and `put`.
        """
        columns = self.read(batch, batch.columns)
        bare = batch.replace(groups=())
        return with_column(bare, value_dtypes(columns), [self.put(key, columns, bare)], np.arange(batch.num_rows))

    @abstractmethod
    def delete(self, refs: Sequence[ChunkRef]) -> int:
        """Delete chunks; returns the bytes freed, 0 when done before."""

    @abstractmethod
    def clear(self, step: int) -> int:
        """Delete the step's chunks and close its lease; returns the bytes freed, 0 when done before."""

    def archive(self, step: int) -> None:
        """Close the step's lease; a durable store keeps its chunks readable until they are cleared."""
        self.clear(step)

    @abstractmethod
    def steps(self) -> list[int]:
        """The steps that the store holds something of, archived ones too."""

    @abstractmethod
    def save_batch(self, batch: BatchHandle) -> None:
        """Note the step's newest handle, so that people find its columns; it goes with the step."""

    @abstractmethod
    def load_batch(self, step: int) -> BatchHandle | None:
        """The handle noted last; None where there is none."""

    @abstractmethod
    def usage(self) -> StoreUsage:
        """What the store holds under leases, over all of its clients."""

    @abstractmethod
    def verify(self, batch: BatchHandle) -> None:
        """See that all chunks of a batch are there, and whole where the store keeps checksums.

        Raises:
            ChunkNotFoundError: One is not there.
            ChunkCorruptedError: One is damaged.
        """

    def close(self) -> None:  # noqa: B027  not abstract: files stay where they are
        """End the store at the end of its run: all that is held under leases is lost."""

    def flush(self) -> None:  # noqa: B027  not abstract: most stores have nothing left to do
        """Wait until all that this client has put is as durable as the store makes it.

        Raises:
            StoreError: Something could not be made durable.
        """

    def take_traffic(self, stage: str) -> StoreTraffic:
        """What this client moved since it was last asked; it is also counted under `stage` in Ray's metrics."""
        traffic, self._traffic = self._traffic, StoreTraffic()
        count_traffic(self.run_id, stage, traffic)
        return traffic

    @abstractmethod
    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        """Store valid columns, with the errors of `put`."""

    @abstractmethod
    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        """Each chunk's asked columns, decoded without a copy; rows that were not asked for may hold anything."""

    def _check_run(self, key: ChunkKey) -> None:
        if key.run_id != self.run_id:
            raise InvalidKeyError(f"chunk {key} is of run {key.run_id}, expected {self.run_id}, whose store this is")

    def _gather(self, batch: BatchHandle, columns: frozenset[str]) -> dict[str, pa.Array]:
        wanted = [_GroupRead.of(group, columns) for group in batch.groups if columns & group.dtypes.keys()]
        reads: dict[ChunkRef, ChunkRead] = {}
        for group in wanted:
            for read in group.reads():
                self._check_run(ChunkKey.parse(read.ref.key))
                reads[read.ref] = reads[read.ref].joined(read) if read.ref in reads else read
        chunks = dict(zip(reads, self._fetch(list(reads.values())), strict=True)) if reads else {}
        for ref, chunk in chunks.items():
            if chunk.num_rows != ref.num_rows:
                raise StoreError(f"chunk {ref.key} holds {chunk.num_rows} rows, expected {ref.num_rows}")
        return {name: group.column(name, chunks) for group in wanted for name in group.names}


@dataclass(frozen=True, eq=False)
class _GroupRead:
    """What a read wants of one column group."""

    group: ColumnGroup
    names: frozenset[str]
    plan: ReadPlan
    gather: Gather

    @classmethod
    def of(cls, group: ColumnGroup, columns: frozenset[str]) -> "_GroupRead":
        try:
            plan = read_plan(group)
        except ValueError as error:
            raise ColumnError(f"the handle of columns {', '.join(group.dtypes)} is damaged: {error}") from error
        return cls(group, frozenset(columns & group.dtypes.keys()), plan, Gather(plan.chunk, plan.start, plan.stop))

    def reads(self) -> Iterator[ChunkRead]:
        for at in self.gather.chunks.tolist():
            mine = self.plan.chunk == at
            yield ChunkRead(self.group.chunks[at], self.names, self.plan.start[mine], self.plan.stop[mine])

    def column(self, name: str, chunks: Mapping[ChunkRef, pa.RecordBatch]) -> pa.Array:
        """One column of the group's rows, [N]."""
        expected = arrow_type(name, self.group.dtypes[name])
        refs = [self.group.chunks[at] for at in self.gather.chunks.tolist()]
        arrays = [chunks[ref].column(name) for ref in refs]
        for ref, array in zip(refs, arrays, strict=True):
            if array.type != expected:
                raise ColumnError(f"column {name!r} of chunk {ref.key} is {array.type}, expected {expected}")
        return self.gather.column(arrays) if arrays else pa.array([], type=expected)


@contextmanager
def reading(ref: ChunkRef) -> Iterator[None]:
    """Errors in a chunk's bytes name the chunk.

    Raises:
        ChunkCorruptedError: The bytes are not a chunk.
        ColumnNotFoundError: They lack a column.
    """
    try:
        yield
    except ColumnNotFoundError as error:
        raise ColumnNotFoundError(f"chunk {ref.key}: {error}") from None
    except ChunkCorruptedError:
        raise
    except StoreError as error:
        raise ChunkCorruptedError(f"chunk {ref.key}: {error}; clear its step and run it again") from error


def decode_chunk(read: ChunkRead, data: pa.Buffer) -> pa.RecordBatch:
    """The asked columns of a whole chunk, as views of `data`.

    Raises:
        ChunkCorruptedError: The bytes are not a chunk, or not as many as the reference says.
        ColumnNotFoundError: They lack a column.
    """
    with reading(read.ref):
        if data.size != read.ref.num_bytes:
            raise StoreError(f"{data.size} bytes are stored, expected {read.ref.num_bytes}")
        return decode(data, read.names)


def _lengths(batch: BatchHandle) -> dict[Axis, Ints]:
    return {"prompt": decode_ints(batch.prompt_lengths), "response": decode_ints(batch.response_lengths)}
