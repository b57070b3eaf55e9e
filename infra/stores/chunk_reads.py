"""The parts of each chunk that a read of some columns needs, and their assembly into rows.

N rows of a batch, P row ranges that they are made of.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from rl_core.columns.codec import arrow_type, decode
from rl_core.columns.gather import Gather, Ints
from rl_core.views import ReadPlan, read_plan
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup
from schemas.errors import ChunkCorruptedError, ColumnError, ColumnNotFoundError, StoreError


@dataclass(frozen=True, eq=False)
class ChunkPart:
    """Some columns of a chunk, and some of their rows."""

    names: frozenset[str]
    starts: Ints  # of row ranges, [P], in no order
    stops: Ints  # [P]


@dataclass(frozen=True, eq=False)
class ChunkRead:
    """The parts of one chunk that a read needs, of different columns: prompts are in fewer rows than responses."""

    ref: ChunkRef
    parts: tuple[ChunkPart, ...]

    @property
    def names(self) -> frozenset[str]:
        """The columns of all parts."""
        return frozenset().union(*(part.names for part in self.parts))


class BatchRead:
    """The reads that together give some columns of a batch's N rows.

    Args:
        batch: The rows.
        columns: The columns to read, all of them in the batch.

    Raises:
        ColumnError: The handle is damaged.
    """

    def __init__(self, batch: BatchHandle, columns: frozenset[str]) -> None:
        self._groups = [_GroupRead.plan(group, columns) for group in batch.groups if columns & group.dtypes.keys()]

    def chunk_reads(self) -> list[ChunkRead]:
        """Return one read per chunk."""
        parts: dict[ChunkRef, list[ChunkPart]] = {}
        for group in self._groups:
            for ref, part in group.chunk_parts():
                parts.setdefault(ref, []).append(part)
        return [ChunkRead(ref, tuple(own)) for ref, own in parts.items()]

    def assemble(self, chunks: Mapping[ChunkRef, pa.RecordBatch]) -> dict[str, pa.Array]:
        """Return each column's N values out of the chunks that were read.

        Raises:
            ColumnError: A stored column is not of the type in the handle.
            StoreError: A chunk has another number of rows than its reference says.
        """
        for ref, chunk in chunks.items():
            check_num_rows(ref, chunk)
        return {name: group.column(name, chunks) for group in self._groups for name in group.names}


@dataclass(frozen=True, eq=False)
class _GroupRead:
    """The part of one column group that a read needs."""

    group: ColumnGroup
    names: frozenset[str]
    rows: ReadPlan
    gather: Gather

    @classmethod
    def plan(cls, group: ColumnGroup, columns: frozenset[str]) -> "_GroupRead":
        try:
            rows = read_plan(group)
        except ValueError as error:
            raise ColumnError(f"the handle of columns {', '.join(group.dtypes)} is damaged: {error}") from error
        return cls(group, frozenset(columns & group.dtypes.keys()), rows, Gather(rows.chunk, rows.start, rows.stop))

    def chunk_parts(self) -> Iterator[tuple[ChunkRef, ChunkPart]]:
        for at in self.gather.chunks.tolist():
            own = self.rows.chunk == at
            yield self.group.chunks[at], ChunkPart(self.names, self.rows.start[own], self.rows.stop[own])

    def column(self, name: str, chunks: Mapping[ChunkRef, pa.RecordBatch]) -> pa.Array:
        """Return one column of the group's rows, [N]."""
        expected = arrow_type(name, self.group.dtypes[name])
        refs = [self.group.chunks[at] for at in self.gather.chunks.tolist()]
        arrays = [chunks[ref].column(name) for ref in refs]
        for ref, array in zip(refs, arrays, strict=True):
            if array.type != expected:
                raise ColumnError(f"column {name!r} of chunk {ref.key} is {array.type}, expected {expected}")
        return self.gather.column(arrays) if arrays else pa.array([], type=expected)


def decode_chunk(ref: ChunkRef, data: pa.Buffer, names: Collection[str] | None = None) -> pa.RecordBatch:
    """Decode the named columns of a whole chunk, or all of them, as views of `data`.

    Raises:
        ChunkCorruptedError: The bytes are not a chunk, or not of the size in the reference.
        ColumnNotFoundError: A column is missing.
    """
    with name_chunk_in_errors(ref):
        if data.size != ref.num_bytes:
            raise StoreError(f"{data.size} bytes are stored, expected {ref.num_bytes}")
        return decode(data, names)


def check_num_rows(ref: ChunkRef, chunk: pa.RecordBatch) -> None:
    """Check that a chunk has the number of rows in its reference.

    Raises:
        StoreError: It has another number.
    """
    if chunk.num_rows != ref.num_rows:
        raise StoreError(f"chunk {ref.key} holds {chunk.num_rows} rows, expected {ref.num_rows}")


@contextmanager
def name_chunk_in_errors(ref: ChunkRef) -> Iterator[None]:
    """Add the chunk's key to errors about its bytes.

    Raises:
        ChunkCorruptedError: The bytes are not a chunk.
        ColumnNotFoundError: A column is missing.
    """
    try:
        yield
    except ColumnNotFoundError as error:
        raise ColumnNotFoundError(f"chunk {ref.key}: {error}") from None
    except ChunkCorruptedError:
        raise
    except StoreError as error:
        raise ChunkCorruptedError(f"chunk {ref.key}: {error}; clear its step and run it again") from error
