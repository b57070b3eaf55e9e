"""Integers inside handles: packed arrays, and the row ranges of a column group."""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from schemas.batch import ChunkRef, ColumnGroup, PackedInts, Segments

Ints = npt.NDArray[np.int64]
IntsLike = npt.NDArray[Any] | Sequence[int]

_WIDTHS: tuple[Literal["u1", "u2", "u4", "u8"], ...] = ("u1", "u2", "u4", "u8")


def pack(ints: IntsLike) -> PackedInts:
    """Pack non-negative integers, shape [n], into a JSON-safe value of constant size when all are equal.

    Raises:
        ValueError: A negative or too large value, or another shape.
        TypeError: Values that are not integers (bool included).
    """
    values = integers(ints)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0:
        raise ValueError(f"can't pack {low}: packed integers are non-negative")
    dtype = next(width for width in _WIDTHS if high <= np.iinfo(width).max)
    stored = values[:1] if low == high else values
    data = base64.b64encode(stored.astype(f"<{dtype}").tobytes()).decode("ascii")
    return PackedInts(size=values.size, dtype=dtype, data=data)


def unpack(packed: PackedInts) -> Ints:
    """The integers that were packed, int64, shape [packed.size].

    Raises:
        ValueError: The data holds neither one value nor `size` values.
    """
    raw = base64.b64decode(packed.data, validate=True)
    width = np.dtype(packed.dtype).itemsize
    if len(raw) not in (packed.size * width, min(packed.size, 1) * width):
        raise ValueError(f"{len(raw)} bytes of {packed.dtype} don't hold {packed.size} integers, nor one for all")
    values = np.frombuffer(raw, dtype=f"<{packed.dtype}").astype(np.int64)
    return values if values.size == packed.size else np.repeat(values, packed.size)


def integers(values: IntsLike) -> Ints:
    """`values`, shape [n], as int64.

    Raises:
        ValueError: Another shape, or a value that does not fit.
        TypeError: Values that are not integers (bool included).
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"expected a 1-D array of integers, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)  # numpy gives an empty list float64
    if array.dtype.kind not in "iu":
        raise TypeError(f"expected integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{array.max()} does not fit in int64")
    return array.astype(np.int64, copy=False)


def expand(segments: Segments) -> Ints:
    """The rows that the ranges cover, in order."""
    return _ranges(unpack(segments.starts), unpack(segments.counts))


def coalesce(rows: Ints) -> Segments:
    """The fewest ranges that cover `rows` in order."""
    if not rows.size:
        return Segments(starts=pack(rows), counts=pack(rows))
    edges = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1, [rows.size]])
    return Segments(starts=pack(rows[edges[:-1]]), counts=pack(np.diff(edges)))


def read_plan(group: ColumnGroup) -> list[tuple[int, int, int]]:
    """Which rows to read: ranges (chunk index, start, stop), none empty, in the group's row order.

    Starts and stops count the rows of their chunk; no range crosses into another chunk.
    """
    bounds = chunk_bounds(group.chunks)
    starts, counts = unpack(group.segments.starts), unpack(group.segments.counts)
    first = np.searchsorted(bounds, starts, side="right") - 1
    last = np.searchsorted(bounds, starts + counts, side="left")
    chunk = _ranges(first, last - first)
    segment = np.repeat(np.arange(starts.size), last - first)
    begin = np.maximum(starts[segment], bounds[chunk]) - bounds[chunk]
    end = np.minimum((starts + counts)[segment], bounds[chunk + 1]) - bounds[chunk]
    kept = end > begin  # a segment may pass over chunks without rows
    return list(zip(chunk[kept].tolist(), begin[kept].tolist(), end[kept].tolist(), strict=True))


def chunk_bounds(chunks: Sequence[ChunkRef]) -> Ints:
    """Where each chunk starts in the concatenation, and where the last one ends: [number of chunks + 1]."""
    return np.cumsum([0, *(chunk.num_rows for chunk in chunks)], dtype=np.int64)


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The concatenated integers of the half-open ranges [start, start + count)."""
    stops = np.cumsum(counts)
    return np.repeat(starts - (stops - counts), counts) + np.arange(counts.sum())
