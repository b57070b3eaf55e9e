"""Gathering row ranges of columns from several chunks in one pass.

P pieces, each a range of rows of one chunk, none empty. Only the values of the pieces are copied, once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rl_core.columns.jagged import is_jagged, jagged, offsets, to_numpy

Ints = npt.NDArray[np.int64]


class Gather:
    """A gather of the rows of all pieces, in order, one column at a time.

    Args:
        chunk: The chunk of each piece, shape [P], P at least 1.
        start: The piece's first row within its chunk, shape [P].
        stop: The row after the piece's last one, shape [P].
    """

    def __init__(self, chunk: Ints, start: Ints, stop: Ints) -> None:
        self.chunks, self._chunk = np.unique(chunk, return_inverse=True)  # the chunks with pieces, ascending
        self._start, self._stop = start, stop
        self._layouts: list[_Layout] = []

    def column(self, arrays: Sequence[pa.Array]) -> pa.Array:
        """Return the rows of one column: for a single piece a view of its memory, else a copy.

        Args:
            arrays: The column's array in each of `chunks`, all of one type.
        """
        counts = self._stop - self._start
        if self._chunk.size <= len(arrays):
            at = zip(self._chunk.tolist(), self._start.tolist(), counts.tolist(), strict=True)
            pieces = [arrays[chunk].slice(first, count) for chunk, first, count in at]
            return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        if not is_jagged(arrays[0]):
            rows = ranges(self._start + _bounds(arrays)[self._chunk], counts)
            return pa.chunked_array(arrays).take(pa.array(rows)).combine_chunks()
        layout = self._layout(arrays)
        values = [_values(array, low, high) for array, (low, high) in zip(arrays, layout.extents, strict=True)]
        pieces = [values[chunk][piece] for chunk, piece in layout.pieces]
        return jagged(_concatenate(pieces, int(layout.lengths.sum())), layout.lengths)

    def _layout(self, arrays: Sequence[pa.LargeListArray]) -> "_Layout":
        """Locate the values of the pieces; columns with equal offsets, as on one axis, share the result."""
        starts = [offsets(array) for array in arrays]
        for layout in self._layouts:
            if all(map(np.array_equal, layout.starts, starts)):
                return layout
        base = _bounds(arrays)[self._chunk]
        first, last = self._start + base, self._stop + base
        lengths = np.concatenate([np.diff(start) for start in starts])
        begins = np.concatenate([start[:-1] for start in starts])
        begin, end = begins[first], begins[last - 1] + lengths[last - 1]
        extents = [
            (int(begin[self._chunk == at].min()), int(end[self._chunk == at].max())) for at in range(len(arrays))
        ]
        shift = np.array([low for low, _ in extents])[self._chunk]
        slices = map(slice, (begin - shift).tolist(), (end - shift).tolist())
        pieces = list(zip(self._chunk.tolist(), slices, strict=True))
        self._layouts.append(_Layout(starts, extents, pieces, lengths[ranges(first, last - first)]))
        return self._layouts[-1]


@dataclass(frozen=True, eq=False)
class _Layout:
    starts: list[Ints]  # row offsets of each chunk
    extents: list[tuple[int, int]]  # the value range of each chunk that covers all of its pieces
    pieces: list[tuple[int, slice]]  # chunk, and values within its extent
    lengths: Ints  # of the requested rows


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate the integers of the half-open ranges [start, start + count)."""
    stops = np.cumsum(counts)
    return np.repeat(starts - (stops - counts), counts) + np.arange(counts.sum())


def _bounds(arrays: Sequence[pa.Array]) -> Ints:
    """Count the rows before each array, and in total."""
    return np.cumsum([0, *map(len, arrays)], dtype=np.int64)


def _concatenate(pieces: list[npt.NDArray[np.generic]], num_values: int) -> npt.NDArray[np.generic]:
    """Concatenate into memory of Arrow's pool: it reuses warm pages, where a fresh page costs more than the copy."""
    dtype, shape = pieces[0].dtype, (num_values, *pieces[0].shape[1:])
    memory = np.frombuffer(pa.allocate_buffer(math.prod(shape) * dtype.itemsize), dtype)
    return np.concatenate(pieces, out=memory.reshape(shape))


def _values(array: pa.LargeListArray, low: int, high: int) -> npt.NDArray[np.generic]:
    base = array.offsets[0].as_py()
    return to_numpy(array.values.slice(base + low, high - low))
