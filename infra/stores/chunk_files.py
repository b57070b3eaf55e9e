"""The chunks of `FsspecColumnStore`: a record and an Arrow file each, with checksums, and where they are."""

from collections import Counter
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

import pyarrow as pa
from pydantic import NonNegativeInt, ValidationError

from infra.storage.folder import Folder
from infra.storage.ledger import step_folder, step_number
from infra.stores.blocks import ChunkBlocks, block_checksums, combine_checksums
from infra.stores.chunk_reads import name_chunk_in_errors
from schemas.base import Frozen
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import ChunkCorruptedError, StoreError

STORE_PATH = "store.json"
BATCH_NAME = "_batch.json"
DATA_SUFFIX = ".arrow"
LEASES = "leases"  # in a folder of their own: they are listed often, and the steps' folders may be many

Record = TypeVar("Record", bound=Frozen)


def lease_path(step: int) -> str:
    """Return the path of a step's lease."""
    return f"{LEASES}/{step_folder(step)}.json"


def leased_step(path: str) -> int | None:
    """Return the step whose lease has this path."""
    return step_number(PurePosixPath(path).stem)


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
        ChunkCorruptedError: The file is not such a record.
    """
    data = folder.read(path)
    try:
        return None if data is None else kind.model_validate_json(data)
    except ValidationError as error:
        raise ChunkCorruptedError(
            f"{path} in {folder} is not a {kind.__name__}: {error.errors()[0]['msg']}; clear its step and run it again"
        ) from None


class ChunkRecord(Frozen):
    """A committed chunk."""

    ref: ChunkRef
    checksum: str  # of all its bytes
    block_checksums: tuple[str, ...]  # of each block, so that a read can check just the blocks that it uses
    compressed_bytes: NonNegativeInt | None = None  # of the file; None: it is not compressed, and has the chunk's size


class ChunkFiles:
    """The chunks of one store.

    Args:
        folder: The store's folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def find(self, key: ChunkKey) -> ChunkRecord | None:
        """Return the record of a committed chunk; None if there is none."""
        return load_record(self._folder, record_path(key), ChunkRecord)

    def records(self, step: int) -> list[ChunkRecord]:
        """Return the records of the step's committed chunks, by key."""
        paths = sorted(path for path in self._folder.sizes(step_folder(step)) if is_record(path, step))
        return [record for path in paths if (record := load_record(self._folder, path, ChunkRecord))]

    def write(self, ref: ChunkRef, data: pa.Buffer, *, is_compressed: bool) -> None:
        """Write a chunk's bytes, then commit it.

        Raises:
            FileExistsError: A chunk is committed under this key.
        """
        checksums = block_checksums(data)
        record = ChunkRecord(
            ref=ref,
            checksum=combine_checksums(checksums),
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
            if combine_checksums(record.block_checksums) != record.checksum:
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

    def delete(self, record: ChunkRecord) -> None:
        """Delete a chunk: its record first, so that it is never half there."""
        key = ChunkKey.parse(record.ref.key)
        self._folder.remove(record_path(key))
        self._folder.remove(data_path(key, record.checksum))

    def clear(self, step: int) -> None:
        """Remove all files of a step: records first, then bytes."""
        for path in sorted(self._folder.sizes(step_folder(step)), key=lambda path: path.endswith(DATA_SUFFIX)):
            self._folder.remove(path)

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
