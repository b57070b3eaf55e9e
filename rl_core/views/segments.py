"""The row ranges of a column group, and their mapping to rows of its chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.views.integers import AnyInts, Ints, decode_ints, encode_ints, narrow_dtype, offsets, take
from schemas.batch import ChunkRef, ColumnGroup, EncodedInts, Segments


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """The reads that give a group's rows: P pieces of its chunks, none empty, in row order. [P] int64 each."""

    chunk: Ints  # index of the piece's chunk in the group
    start: Ints  # the piece's first row, counted in that chunk
    stop: Ints  # the row after its last one


def pick(segments: Segments, indices: Sequence[AnyInts]) -> list[Segments]:
    """Select from the rows that `segments` cover, once by each index, in its order; indices must be in range."""
    dtype = narrow_dtype(_limit(segments.starts) + _limit(segments.counts))  # holds the end of every range
    if segments.starts.size == 1:  # the rows of one range are its start plus the index
        start = segments.starts.base
        return [coalesce(np.add(index, start, dtype=dtype, casting="unsafe")) for index in indices]
    if segments.counts.base == 1 and not segments.counts.data:
        rows = offsets(segments.starts).astype(dtype, copy=False)
        rows = rows + dtype(segments.starts.base) if segments.starts.base else rows
    else:
        rows = row_numbers(segments, dtype)
    return [coalesce(take(rows, index)) for index in indices]


def row_numbers(segments: Segments, dtype: type[np.integer[Any]] = np.int64) -> Any:
    """Return the numbers of the rows that `segments` cover, [N], counted over the group's chunks."""
    return _ranges(decode_ints(segments.starts), decode_ints(segments.counts), dtype)


def coalesce(rows: AnyInts) -> Segments:
    """Return the ranges that cover `rows` in order; the dtype of `rows` must hold one more than the highest row."""
    breaks = np.diff(rows) != 1
    if _stand_alone(int(np.count_nonzero(breaks)) + 1, rows.size):
        return _single_rows(rows)
    edges = np.concatenate([[0], np.flatnonzero(breaks) + 1, [rows.size]])
    return Segments(starts=encode_ints(rows[edges[:-1]]), counts=encode_ints(np.diff(edges)))


def merge(starts: Ints, counts: Ints) -> Segments:
    """Merge adjacent ranges [start, start + count), in order, and drop empty ones."""
    if not counts.all():
        starts, counts = starts[counts > 0], counts[counts > 0]
    opens = np.ones(starts.size, dtype=np.bool_)
    opens[1:] = starts[1:] != (starts + counts)[:-1]
    num_rows = int(counts.sum())
    if _stand_alone(int(np.count_nonzero(opens)), num_rows):
        return _single_rows(starts if starts.size == num_rows else _ranges(starts, counts))
    heads = np.flatnonzero(opens)
    return Segments(starts=encode_ints(starts[heads]), counts=encode_ints(np.add.reduceat(counts, heads)))


def read_plan(group: ColumnGroup) -> ReadPlan:
    """Map a group's segments to row ranges of its chunks; a range that spans several chunks is split.

    Raises:
        ValueError: The segments have rows that the chunks don't have.
    """
    bounds = chunk_bounds(group.chunks)
    sizes = np.diff(bounds, append=bounds[-1])  # rows past the last chunk count as a chunk of no rows
    starts, counts = decode_ints(group.segments.starts), decode_ints(group.segments.counts)
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
    """Return the start of each chunk in the concatenation, and the end of the last one: [number of chunks + 1]."""
    return np.cumsum([0, *(chunk.num_rows for chunk in chunks)], dtype=np.int64)


def _limit(encoded: EncodedInts) -> int:
    """Return an upper bound of the encoded integers."""
    return encoded.base + (256**encoded.item_bytes - 1 if encoded.data else 0)


def _stand_alone(num_ranges: int, num_rows: int) -> bool:
    """Return whether to store rows one by one: the few neighbors in a shuffled batch would cost a count per range."""
    return 64 * num_ranges > 63 * num_rows


def _single_rows(rows: AnyInts) -> Segments:
    return Segments(starts=encode_ints(rows), counts=encode_ints([1][: rows.size]).replace(size=rows.size))


def _ranges(starts: Ints, counts: Ints, dtype: type[np.integer[Any]] = np.int64) -> Any:
    """Concatenate the integers of the half-open ranges [start, start + count)."""
    stops = np.cumsum(counts)
    # The difference may be negative: an unsigned dtype wraps around, and back again in the sum.
    return np.repeat((starts - (stops - counts)).astype(dtype), counts) + np.arange(counts.sum(), dtype=dtype)
