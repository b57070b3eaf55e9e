"""What every column store promises; `tests/contracts/test_column_store.py` holds each backend to it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pyarrow as pa

from rl_core.columns.codec import arrow_type, check_row_lengths, encode, validate
from rl_core.views import read_plan, unpack
from rl_core.views.packed import Ints
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, ColumnGroup
from schemas.catalog import Axis, column_spec
from schemas.errors import ColumnError, ColumnNotFoundError, StoreError
from schemas.step import StoreUsage


class ColumnStore(ABC):
    """Chunks of columns under string keys, one lease per step.

    The store owns the bytes: they outlive the process that put them, and go when the step is cleared. What a
    read returns is immutable, and stays valid after the step is cleared for as long as it is referenced.
    """

    generation: str  # this incarnation of the store; a handle of another one is never served
    bytes_read: ClassVar[int] = 0  # bytes of the columns that reads returned in this process, mapped or copied

    @abstractmethod
    def open_lease(self, run_id: str, step: int) -> None:
        """Allow puts of this step. Opening again changes nothing, and drops nothing that is held."""

    def put(self, key: ChunkKey, columns: pa.RecordBatch, batch: BatchHandle | None = None) -> ChunkRef:
        """Store N rows of columns under `key`. A repeated put of equal content returns the same reference.

        Args:
            key: The chunk's deterministic name.
            columns: What the catalogue declares, exactly; nothing is converted.
            batch: The N rows that these columns extend, where there are any already; jagged columns must have
                their lengths.

        Raises:
            ColumnError: A column is not as declared, or its rows are not the batch's.
            LeaseError: The step's lease is not open.
            DuplicateChunkError: The key holds other content.
            CapacityError: The store would hold more bytes than it may.
        """
        if batch is not None and batch.num_rows != columns.num_rows:
            raise ColumnError(f"{key} has {columns.num_rows} rows, expected the batch's {batch.num_rows}")
        validate(columns, None if batch is None else _lengths(batch))
        return self._put(key, columns.num_rows, encode(columns))

    def read(self, batch: BatchHandle, columns: Sequence[str]) -> pa.RecordBatch:
        """Read the named columns of exactly the batch's N rows, in its order.

        Where a column's rows are one range of one chunk, the result is a view of the stored bytes; otherwise
        they are copied, and no other rows.

        Raises:
            ColumnNotFoundError: A column has not been produced.
            ChunkNotFoundError: A chunk was cleared, or belongs to a lost store.
            ColumnError: Stored columns are not what the handle says.
            ValueError: No column is named, or one twice.
        """
        if not columns or len(set(columns)) != len(columns):
            raise ValueError(f"a read names each column it wants once, got {list(columns)}")
        missing = [name for name in columns if name not in batch.columns]
        if missing:
            raise ColumnNotFoundError(
                f"step {batch.step} has no column {missing[0]!r}; produced so far: {', '.join(batch.columns)}"
            )
        arrays = self._gather(batch, set(columns))
        lengths = _lengths(batch)
        for name in columns:
            if (axis := column_spec(name).axis) != "row":
                check_row_lengths(name, arrays[name], lengths[axis])
        result = pa.RecordBatch.from_arrays([arrays[name] for name in columns], names=list(columns))
        ColumnStore.bytes_read += result.nbytes
        return result

    @abstractmethod
    def clear(self, run_id: str, step: int) -> int:
        """Delete the step's chunks and close its lease; returns the bytes freed, 0 when done before."""

    @abstractmethod
    def usage(self) -> StoreUsage:
        """What the store holds, over all of its clients."""

    @abstractmethod
    def _put(self, key: ChunkKey, num_rows: int, data: pa.Buffer) -> ChunkRef:
        """Store an encoded chunk, with the errors of `put`."""

    @abstractmethod
    def _fetch(self, refs: list[ChunkRef]) -> list[pa.RecordBatch]:
        """The chunks, decoded without a copy, in order; raises ChunkNotFoundError."""

    def _gather(self, batch: BatchHandle, columns: set[str]) -> dict[str, pa.Array]:
        wanted = [(group, read_plan(group)) for group in batch.groups if columns & set(group.dtypes)]
        refs = list(dict.fromkeys(group.chunks[at] for group, plan in wanted for at, _, _ in plan))
        chunks = dict(zip(refs, self._fetch(refs), strict=True)) if refs else {}
        for ref, chunk in chunks.items():
            if chunk.num_rows != ref.num_rows:
                raise StoreError(f"chunk {ref.key} holds {chunk.num_rows} rows, expected {ref.num_rows}")
        return {
            name: _gather_column(name, group, plan, chunks)
            for group, plan in wanted
            for name in group.dtypes
            if name in columns
        }


def _lengths(batch: BatchHandle) -> dict[Axis, Ints]:
    return {"prompt": unpack(batch.prompt_lengths), "response": unpack(batch.response_lengths)}


def _gather_column(
    name: str,
    group: ColumnGroup,
    plan: Sequence[tuple[int, int, int]],
    chunks: Mapping[ChunkRef, pa.RecordBatch],
) -> pa.Array:
    """One column of the planned row ranges, [N]; a single range is a view."""
    expected = arrow_type(name, group.dtypes[name])
    sources = {at: _chunk_column(name, group.chunks[at], chunks, expected) for at in {at for at, _, _ in plan}}
    pieces = [sources[at].slice(start, stop - start) for at, start, stop in plan]
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_arrays(pieces) if pieces else pa.array([], type=expected)


def _chunk_column(
    name: str, ref: ChunkRef, chunks: Mapping[ChunkRef, pa.RecordBatch], expected: pa.DataType
) -> pa.Array:
    schema = chunks[ref].schema
    if name not in schema.names:
        raise ColumnNotFoundError(f"chunk {ref.key} has no column {name!r}; it has {', '.join(schema.names)}")
    column = chunks[ref].column(name)
    if column.type != expected:
        raise ColumnError(f"column {name!r} of chunk {ref.key} is {column.type}, expected {expected}")
    return column
