"""Integers inside handles: packed arrays, the row ranges of a column group, and what to read of its chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.batch import ChunkRef, ColumnGroup, PackedInts, Segments

AnyInts = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]
IntsLike = npt.NDArray[Any] | Sequence[int]

_DTYPES: tuple[Literal["u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8"], ...] = (
    "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """What to read of a group: P pieces of its chunks, none empty, in the group's row order. [P] int64 each."""

    chunk: Ints  # the piece's chunk, by its place in the group
    start: Ints  # the piece's rows, half-open, counted in that chunk
    stop: Ints


def pack(ints: IntsLike, base: int = 0) -> PackedInts:
    """Pack `base` plus each of `ints`, shape [n], in as many bytes each as their range needs; none if all are equal.

    Raises:
        ValueError: A negative or too large value, or another shape.
        TypeError: Values that are not integers (bool included).
    """
    values = _checked(ints)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0:
        raise ValueError(f"can't pack {low}: packed integers are non-negative")
    if low == high:
        return PackedInts(size=values.size, base=base + low if values.size else 0, dtype="u1", data=b"")
    words = np.dtype(narrow_dtype(high - low)).newbyteorder("<")
    data = (values - low if low else values).astype(words, copy=False).tobytes()
    dtype = _DTYPES[((high - low).bit_length() - 1) // 8]
    return PackedInts(size=values.size, base=base + low, dtype=dtype, data=data)


def unpack(packed: PackedInts) -> Ints:
    """The integers that were packed, int64, shape [packed.size]."""
    values = offsets(packed).astype(np.int64)
    values += packed.base
    return values


def offsets(packed: PackedInts) -> AnyInts:
    """What each packed integer adds to `packed.base`, shape [packed.size], in a narrow unsigned dtype."""
    if not packed.data:
        return np.zeros(packed.size, dtype=np.uint8)
    return np.frombuffer(packed.data, dtype=f"<u{packed.word_bytes}")


def total(packed: PackedInts) -> int:
    """The sum of the integers that were packed."""
    return packed.size * packed.base + (int(offsets(packed).sum(dtype=np.int64)) if packed.data else 0)


def integers(values: IntsLike) -> Ints:
    """`values`, shape [n], as int64.

    Raises:
        ValueError: Another shape, or a value that does not fit.
        TypeError: Values that are not integers (bool included).
    """
    return _checked(values).astype(np.int64, copy=False)


def narrow_dtype(limit: int) -> type[np.integer[Any]]:
    """The narrowest of numpy's unsigned dtypes, or int64, that holds 0 to `limit`."""
    return next((dtype for dtype in (np.uint8, np.uint16, np.uint32) if limit <= np.iinfo(dtype).max), np.int64)


def take(values: AnyInts, index: AnyInts) -> AnyInts:
    """`values[index]`, read-only, for an index that was checked: a wrong one reads memory that is not the array's."""
    taken: AnyInts = pc.take(pa.array(values), pa.array(index), boundscheck=False).to_numpy()
    return taken


def pick(segments: Segments, indices: Sequence[AnyInts]) -> list[Segments]:
    """For each checked index: the segments of these of the rows that `segments` cover, in the order asked."""
    dtype = narrow_dtype(_limit(segments.starts) + _limit(segments.counts))  # holds where every range stops
    if segments.starts.size == 1:  # one range counts on from its start; no array of its rows is needed
        start = segments.starts.base
        return [coalesce(np.add(index, start, dtype=dtype, casting="unsafe")) for index in indices]
    if segments.counts.base == 1 and not segments.counts.data:
        rows = offsets(segments.starts).astype(dtype, copy=False)
        rows = rows + dtype(segments.starts.base) if segments.starts.base else rows
    else:
        rows = _ranges(unpack(segments.starts), unpack(segments.counts), dtype)
    return [coalesce(take(rows, index)) for index in indices]


def coalesce(rows: AnyInts) -> Segments:
    """The ranges that cover `rows` in order; their dtype holds one more than the highest row."""
    breaks = np.diff(rows) != 1
    if _stand_alone(int(np.count_nonzero(breaks)) + 1, rows.size):
        return _single_rows(rows)
    edges = np.concatenate([[0], np.flatnonzero(breaks) + 1, [rows.size]])
    return Segments(starts=pack(rows[edges[:-1]]), counts=pack(np.diff(edges)))


def merge(starts: Ints, counts: Ints) -> Segments:
    """The ranges that cover the ranges [start, start + count) in order; empty ones are dropped."""
    if not counts.all():
        starts, counts = starts[counts > 0], counts[counts > 0]
    opens = np.ones(starts.size, dtype=np.bool_)
    opens[1:] = starts[1:] != (starts + counts)[:-1]
    num_rows = int(counts.sum())
    if _stand_alone(int(np.count_nonzero(opens)), num_rows):
        return _single_rows(starts if starts.size == num_rows else _ranges(starts, counts))
    heads = np.flatnonzero(opens)
    return Segments(starts=pack(starts[heads]), counts=pack(np.add.reduceat(counts, heads)))


def read_plan(group: ColumnGroup) -> ReadPlan:
    """Which rows of which chunks to read; a range that crosses into another chunk is cut there.

    Raises:
        ValueError: The segments name rows that the chunks don't have.
    """
    bounds = chunk_bounds(group.chunks)
    sizes = np.diff(bounds, append=bounds[-1])  # what lies past the last chunk is in one of no rows
    starts, counts = unpack(group.segments.starts), unpack(group.segments.counts)
    chunk = np.searchsorted(bounds, starts, side="right") - 1
    begin = starts - bounds[chunk]
    end = begin + counts
    if (end <= sizes[chunk]).all():
        return ReadPlan(chunk=chunk, start=begin, stop=end)
    stops = starts + counts
    if stops.max() > bounds[-1]:
        raise ValueError(f"segments end at row {stops.max()} of chunks of {bounds[-1]} rows")
    num_chunks = np.searchsorted(bounds, stops, side="left") - chunk
    segment = np.repeat(np.arange(starts.size), num_chunks)
    chunk = _ranges(chunk, num_chunks)
    begin = np.maximum(starts[segment], bounds[chunk]) - bounds[chunk]
    end = np.minimum(stops[segment], bounds[chunk + 1]) - bounds[chunk]
    kept = end > begin  # a range may pass over empty chunks
    return ReadPlan(chunk=chunk[kept], start=begin[kept], stop=end[kept])


def chunk_bounds(chunks: Sequence[ChunkRef]) -> Ints:
    """Where each chunk starts in the concatenation, and where the last one ends: [number of chunks + 1]."""
    return np.cumsum([0, *(chunk.num_rows for chunk in chunks)], dtype=np.int64)


def _checked(values: IntsLike) -> AnyInts:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"expected a 1-D array of integers, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)  # numpy gives an empty list float64
    if array.dtype.kind not in "iu":
        raise TypeError(f"expected integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{array.max()} does not fit in int64")
    return array


def _limit(packed: PackedInts) -> int:
    """No packed integer is above this."""
    return packed.base + (256**packed.item_bytes - 1 if packed.data else 0)


def _stand_alone(num_ranges: int, num_rows: int) -> bool:
    """Whether to store rows one by one: shuffled rows with a few neighbours among them have the longer counts."""
    return 64 * num_ranges > 63 * num_rows


def _single_rows(rows: AnyInts) -> Segments:
    return Segments(starts=pack(rows), counts=pack([1][: rows.size]).replace(size=rows.size))


def _ranges(starts: Ints, counts: Ints, dtype: type[np.integer[Any]] = np.int64) -> Any:
    """The concatenated integers of the half-open ranges [start, start + count)."""
    stops = np.cumsum(counts)
    # The difference may be negative: an unsigned dtype wraps around, and back in the sum.
    return np.repeat((starts - (stops - counts)).astype(dtype), counts) + np.arange(counts.sum(), dtype=dtype)
