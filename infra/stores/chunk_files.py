"""The chunks of `FsspecColumnStore`: a record and an Arrow file each, and where they are.

A chunk's bytes are divided into blocks of `BLOCK_BYTES`, each with its own checksum. A read names byte ranges; the
blocks that cover them are fetched in one request and checked. No other block is touched: those of a mapped file stay on
disk, those of a remote file are not transferred.
"""

import json
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Literal, TypeVar

import pyarrow as pa
import xxhash
from pydantic import NonNegativeInt, ValidationError

from infra.storage.folder import Folder
from infra.storage.ledger import step_folder, step_number
from infra.stores.chunk_reads import name_chunk_in_errors
from rl_core.columns.codec import Extent, row_extents
from rl_core.columns.gather import Ints
from schemas.base import Frozen
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import ChunkCorruptedError, RunError, StoreError

Format = Literal[1, 2]  # since 2, samples of a prompt share it
FORMAT: Format = 2  # of the records and what they name; to be raised when an earlier Sluice can't read what is written
BLOCK_BYTES = 2**20
STORE_PATH = "store.json"
BATCH_NAME = "_batch.json"
DATA_SUFFIX = ".arrow"
OPEN_STEPS = "open"  # in a folder of their own: they are listed often, and the steps' folders may be many

Record = TypeVar("Record", bound=Frozen)


def open_path(step: int) -> str:
    """Return the path of the file that exists while a step is open."""
    return f"{OPEN_STEPS}/{step_folder(step)}"


def opened_step(path: str) -> int | None:
    """Return the step whose `open_path` this is."""
    return step_number(PurePosixPath(path).name)


def batch_path(step: int) -> str:
    """Return the path of a step's newest handle."""
    return f"{step_folder(step)}/{BATCH_NAME}"


def record_path(key: ChunkKey) -> str:
    """Return the path of a chunk's record."""
    return f"{step_folder(key.step)}/{key.stage}-{key.shard}-{key.attempt}.json"


def data_path(key: ChunkKey, checksum: str) -> str:
    """Return the path of a chunk's bytes, which have this checksum."""
    return f"{step_folder(key.step)}/{key.stage}-{key.shard}-{key.attempt}.{checksum}{DATA_SUFFIX}"


def is_record(path: str, step: int) -> bool:
    """Return whether a path is that of a record of one of the step's chunks."""
    parts = PurePosixPath(path)
    return str(parts.parent) == step_folder(step) and parts.suffix == ".json" and not parts.name.startswith("_")


def step_of(path: str) -> int | None:
    """Return the step whose folder a path is in; None if it is in none."""
    return step_number(PurePosixPath(path).parts[0])


def load_record(folder: Folder, path: str, kind: type[Record]) -> Record | None:
    """Read a JSON record; return None if there is no such file.

    Raises:
        RunError: It has a newer format.
        ChunkCorruptedError: The file is not such a record.
    """
    data = folder.read(path)
    return None if data is None else parse_record(folder, path, data, kind)


def parse_record(folder: Folder, path: str, data: bytes, kind: type[Record]) -> Record:
    """Return the record that a file holds, with the errors of `load_record`."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        if (found := _format_of(data)) > FORMAT:
            raise RunError(
                f"{path} in {folder} has format {found}, but this Sluice reads only formats up to {FORMAT}: use the "
                "newer Sluice that wrote it"
            ) from None
        raise ChunkCorruptedError(
            f"{path} in {folder} is not a {kind.__name__}: {error.errors()[0]['msg']}; clear its step and run it again"
        ) from None


def _format_of(data: bytes) -> int:
    """Return the format of what may be a record; records before formats were counted are of format 1."""
    try:
        found = json.loads(data)
    except ValueError:
        return 1
    number = found.get("format") if isinstance(found, dict) else None
    return number if isinstance(number, int) else 1


class StoreRecord(Frozen):
    """The store that a folder holds."""

    format: Format = FORMAT
    run_id: str
    incarnation: str


class ChunkRecord(Frozen):
    """A committed chunk."""

    format: Format = FORMAT
    ref: ChunkRef
    checksum: str  # of all its bytes
    block_checksums: tuple[str, ...]  # of each block, so that a read can check just the blocks that it uses
    compressed_bytes: NonNegativeInt | None = None  # of the file; None: it is not compressed, and has the chunk's size


class ChunkBlocks:
    """A chunk's bytes, of which only the requested blocks are loaded.

    Args:
        num_bytes: The chunk's size.
        checksums: Those of its blocks, see `_block_checksums`.
        mapped: The whole file, mapped; None if it is remote.
        fetch: Reads byte ranges of the file.
    """

    def __init__(
        self,
        num_bytes: int,
        checksums: Sequence[str],
        mapped: pa.Buffer | None,
        fetch: Callable[[list[Extent]], list[bytes]],
    ) -> None:
        self._num_bytes, self._checksums, self._fetch = num_bytes, checksums, fetch
        self._memory: mmap.mmap | None = None
        if mapped is None:
            self._memory = mmap.mmap(-1, max(num_bytes, 1))  # pages cost nothing until they are used
            mapped = pa.py_buffer(memoryview(self._memory)[:num_bytes].toreadonly())
        self.buffer = mapped
        self._loaded: set[int] = set()

    def load(self, ranges: Sequence[Extent]) -> None:
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
        """Load and check what is read of some columns' rows; see `rl_core.columns.codec.row_extents`.

        Raises:
            StoreError: The bytes are not an Arrow file, or a block is not what was put.
        """
        for extents in row_extents(self.buffer, names, starts, stops):
            self.load(extents)


class ChunkFiles:
    """The chunks of one store."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def find(self, key: ChunkKey) -> ChunkRecord | None:
        """Return the record of a committed chunk; None if there is none."""
        return load_record(self._folder, record_path(key), ChunkRecord)

    def records(self, step: int) -> list[ChunkRecord]:
        """Return the records of the step's committed chunks, by key."""
        paths = sorted(path for path in self._folder.sizes(step_folder(step)) if is_record(path, step))
        return self._load(paths)

    def find_all(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord]:
        """Return the records of those of these chunks that are committed."""
        return self._load([record_path(key) for key in keys])

    def write(self, ref: ChunkRef, data: pa.Buffer, *, is_compressed: bool) -> None:
        """Write a chunk's bytes, then commit it.

        Raises:
            FileExistsError: A chunk is committed under this key.
        """
        checksums = _block_checksums(data)
        record = ChunkRecord(
            ref=ref,
            checksum=_combine_checksums(checksums),
            block_checksums=checksums,
            compressed_bytes=data.size if is_compressed else None,
        )
        key = ChunkKey.parse(ref.key)
        self._folder.write(data_path(key, record.checksum), data)
        self._folder.create(record_path(key), record.model_dump_json().encode())

    def open(self, record: ChunkRecord, ref: ChunkRef) -> ChunkBlocks:
        """Return a chunk's bytes, without loading any of them, unless they are compressed.

        Args:
            record: The chunk's record.
            ref: The reference that the record must be of.

        Raises:
            ChunkCorruptedError: The record is of another chunk, or damaged, or the file has another size.
        """
        with name_chunk_in_errors(ref):
            if record.ref != ref:
                raise StoreError(f"its record says {record.ref}, expected {ref}")
            if _combine_checksums(record.block_checksums) != record.checksum:
                raise StoreError("the checksums in its record disagree")
            path = data_path(ChunkKey.parse(ref.key), record.checksum)
            expected = ref.num_bytes if record.compressed_bytes is None else record.compressed_bytes
            if (size := self._folder.size(path)) != expected:
                raise StoreError(f"{size or 0} bytes are stored, expected {expected}")
            fetch = partial(self._folder.read_ranges, path)
            blocks = ChunkBlocks(expected, record.block_checksums, self._folder.map(path), fetch)
            if record.compressed_bytes is not None:  # its rows can't be told apart
                blocks.load_all()
            return blocks

    def delete(self, records: Sequence[ChunkRecord]) -> None:
        """Delete chunks: their records first, so that none is ever half there."""
        checksums = {ChunkKey.parse(record.ref.key): record.checksum for record in records}
        self._folder.remove_all([record_path(key) for key in checksums])
        self._folder.remove_all([data_path(key, checksum) for key, checksum in checksums.items()])

    def clear(self, step: int) -> None:
        """Remove all files of a step: records first, then bytes."""
        paths = list(self._folder.sizes(step_folder(step)))
        for has_data in (False, True):
            self._folder.remove_all([path for path in paths if path.endswith(DATA_SUFFIX) is has_data])

    def drop_leftovers(self, step: int) -> None:
        """Remove what killed writers have left in a step to which nothing is written any more.

        These are parts of files, and bytes that no record names.

        Raises:
            ChunkCorruptedError: A record is damaged, so that it isn't known which files are needed.
        """
        records = {ChunkKey.parse(record.ref.key): record.checksum for record in self.records(step)}
        named = {path for key, checksum in records.items() for path in (record_path(key), data_path(key, checksum))}
        found = self._folder.sizes(step_folder(step), unfinished=True)
        self._folder.remove_all([path for path in found if path not in {*named, batch_path(step)}])

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in order."""
        return sorted(step for name in self._folder.subfolders() if (step := step_number(name)) is not None)

    def bytes_by_step(self, within: str = "", *, only_linked: bool = False) -> Counter[int]:
        """Return the bytes of each step's chunks.

        Args:
            within: Only those in this subfolder.
            only_linked: Only those that another run has, too, by hard links.
        """
        held: Counter[int] = Counter()
        for path, size in self._folder.sizes(within, only_linked=only_linked).items():
            if path.endswith(DATA_SUFFIX) and (step := step_of(path)) is not None:
                held[step] += size
        return held

    def _load(self, paths: Sequence[str]) -> list[ChunkRecord]:
        found = self._folder.read_existing(paths)
        return [parse_record(self._folder, path, data, ChunkRecord) for path, data in found.items()]


def _block_checksums(data: pa.Buffer) -> tuple[str, ...]:
    """Return the XXH3-64 of each block, hex."""
    view = memoryview(data)
    return tuple(
        xxhash.xxh3_64_hexdigest(view[start : start + BLOCK_BYTES]) for start in range(0, data.size, BLOCK_BYTES)
    )


def _combine_checksums(checksums: Sequence[str]) -> str:
    """Return one checksum for all blocks: the XXH3-128 of theirs, hex."""
    return str(xxhash.xxh3_128_hexdigest("".join(checksums).encode()))
