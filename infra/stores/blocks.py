"""A stored chunk that is read in blocks, each checked against its own checksum.

A chunk's bytes are divided into blocks of `BLOCK_BYTES`. A read names byte ranges; the blocks that cover them are
fetched in one request and checked. No other block is touched: those of a mapped file stay on disk, those of a remote
file are not transferred.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from rl_core.columns.codec import value_bits
from rl_core.columns.gather import Ints
from rl_core.columns.jagged import is_jagged, offsets
from schemas.errors import StoreError

BLOCK_BYTES = 2**20
_HEAD_BYTES = _TAIL_BYTES = 2**16  # hold an Arrow file's schema and footer, unless it has thousands of columns

Range = tuple[int, int]  # first byte, and the one after the last


def block_checksums(data: pa.Buffer) -> tuple[str, ...]:
    """Return the XXH3-64 of each block, hex."""
    view = memoryview(data)
    return tuple(
        xxhash.xxh3_64_hexdigest(view[start : start + BLOCK_BYTES]) for start in range(0, data.size, BLOCK_BYTES)
    )


def combine_checksums(checksums: Sequence[str]) -> str:
    """Return one checksum for all blocks: the XXH3-128 of theirs, hex."""
    return str(xxhash.xxh3_128_hexdigest("".join(checksums).encode()))


class ChunkBlocks:
    """A chunk's bytes, of which only the requested blocks are loaded.

    Args:
        num_bytes: The chunk's size.
        checksums: Its `block_checksums`.
        mapped: The whole file, mapped; None if it is remote.
        fetch: Reads byte ranges of the file.
    """

    def __init__(
        self,
        num_bytes: int,
        checksums: Sequence[str],
        mapped: pa.Buffer | None,
        fetch: Callable[[list[Range]], list[bytes]],
    ) -> None:
        self._num_bytes, self._checksums, self._fetch = num_bytes, checksums, fetch
        self._memory: mmap.mmap | None = None
        if mapped is None:
            self._memory = mmap.mmap(-1, max(num_bytes, 1))  # pages cost nothing until they are used
            mapped = pa.py_buffer(memoryview(self._memory)[:num_bytes].toreadonly())
        self.buffer = mapped
        self._loaded: set[int] = set()

    def load(self, ranges: Sequence[Range]) -> None:
        """Load and check the blocks that cover these ranges.

        Raises:
            StoreError: A block is not what was put.
        """
        needed = {
            block
            for start, stop in ranges
            if start < stop
            for block in range(start // BLOCK_BYTES, -(-min(stop, self._num_bytes) // BLOCK_BYTES))
        }
        missing = sorted(needed - self._loaded)
        extents = [(at * BLOCK_BYTES, min((at + 1) * BLOCK_BYTES, self._num_bytes)) for at in missing]
        if self._memory is not None and extents:
            for (start, stop), data in zip(extents, self._fetch(extents), strict=True):
                if len(data) != stop - start:
                    raise StoreError(f"bytes {start} to {stop} are {len(data)}, expected {stop - start}: it is cut off")
                self._memory[start:stop] = data
        view = memoryview(self.buffer)
        for at, (start, stop) in zip(missing, extents, strict=True):
            if (checksum := xxhash.xxh3_64_hexdigest(view[start:stop])) != self._checksums[at]:
                raise StoreError(
                    f"the checksum of bytes {start} to {stop} is {checksum}, expected {self._checksums[at]}"
                )
        self._loaded.update(missing)

    @property
    def is_loaded(self) -> bool:
        """Whether all blocks are loaded."""
        return len(self._loaded) == len(self._checksums)

    def load_all(self) -> None:
        """Load and check all blocks.

        Raises:
            StoreError: A block is not what was put.
        """
        self.load([(0, self._num_bytes)])

    def load_rows(self, names: frozenset[str], starts: Ints, stops: Ints) -> None:
        """Load and check what a decoder reads of some columns' row ranges.

        Args:
            names: The columns; names that the chunk lacks are ignored.
            starts: The ranges' first rows, [P].
            stops: The rows after their last ones, [P].

        Raises:
            StoreError: The bytes are not an Arrow file, or a block is not what was put.
        """
        self.load([(0, _HEAD_BYTES), (max(0, self._num_bytes - _TAIL_BYTES), self._num_bytes)])
        try:
            with pa.ipc.open_file(self.buffer) as file:
                columns = file.get_batch(0) if file.num_record_batches == 1 else None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StoreError(f"its bytes are not an Arrow file: {error}") from error
        if columns is None:
            return
        arrays = [columns.column(name) for name in columns.schema.names if name in names]
        self.load([extent for array in arrays for extent in self._structure(array)])
        self.load([extent for array in arrays for extent in self._values(array, starts, stops)])

    def _structure(self, array: pa.Array) -> Iterator[Range]:
        """Yield the ranges of a column's validity bits and offsets: all are needed, as all are checked."""
        validity, second = array.buffers()[:2]
        yield self._extent(validity)
        if is_jagged(array) or pa.types.is_string(array.type):
            yield self._extent(second)

    def _values(self, array: pa.Array, starts: Ints, stops: Ints) -> Iterator[Range]:
        """Yield the ranges of the rows' values."""
        if is_jagged(array):
            starts, stops = offsets(array)[starts], offsets(array)[stops]
        elif pa.types.is_string(array.type):
            bounds = np.frombuffer(array.buffers()[1], np.int32).astype(np.int64)
            starts, stops = bounds[starts], bounds[stops]
        values = array.values if is_jagged(array) else array
        bits = 8 if pa.types.is_string(values.type) else value_bits(values.type)
        data = values.buffers()[-1]
        yield self._extent(values.buffers()[0])
        first = self._extent(data)[0]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield first + start * bits // 8, first + -(-stop * bits // 8)

    def _extent(self, part: pa.Buffer | None) -> Range:
        if part is None:
            return 0, 0
        start = part.address - self.buffer.address
        return start, start + part.size
