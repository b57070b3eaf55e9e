"""A folder on any fsspec file system: atomic and exclusive writes, mapped reads, and no way out of it."""

import os
import uuid
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from schemas.errors import InvalidKeyError


class Folder:
    """Files under one URL, by relative name. Whole files only: a reader sees an old one, a new one, or none.

    Args:
        url: Any fsspec URL, or a local path.
        storage_options: What fsspec passes to the file system.
    """

    def __init__(self, url: str, storage_options: dict[str, Any]) -> None:
        # Other processes write here: a cached listing would be wrong.
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **storage_options)
        self._root = root.rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def __str__(self) -> str:
        return str(self._fs.unstrip_protocol(self._root))

    def read(self, name: str) -> bytes | None:
        """A small file's content; None where there is no such file."""
        try:
            data: bytes = self._fs.cat_file(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data

    def size(self, name: str) -> int | None:
        """A file's bytes; None where there is no such file."""
        try:
            return int(self._fs.size(self._path(name)))
        except FileNotFoundError:
            return None

    def map(self, name: str) -> pa.Buffer | None:
        """A local file's content, mapped; None where files come over a wire."""
        if not self._is_local:
            return None
        with pa.memory_map(self._path(name)) as file:
            return file.read_buffer()

    def read_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Byte ranges of a file, in one request where the file system can do that."""
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        found = self._fs.cat_ranges([self._path(name)] * len(ranges), starts, stops, on_error="raise")
        return [bytes(data) for data in found]

    def write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Replace a file."""
        path = self._path(name)
        if self._is_local:
            os.replace(_write_aside(path, data), path)
            _sync_folder(path)
        else:
            self._fs.pipe_file(path, _plain(data))

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not be there: of two writers, one wins.

        Raises:
            FileExistsError: It is there.
        """
        path = self._path(name)
        if not self._is_local:
            self._fs.pipe_file(path, data, mode="create")
            return
        aside = _write_aside(path, data)
        try:
            os.link(aside, path)
        finally:
            os.unlink(aside)
        _sync_folder(path)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove a sub-folder and all that it holds, if it is there; one that is being written to stays."""
        with suppress(OSError):
            self._fs.rm(self._path(name), recursive=True)

    def sizes(self, within: str = "") -> dict[str, int]:
        """All files of a sub-folder, by name relative to this one, and their bytes; without those being written."""
        found = self._fs.find(self._path(within), detail=True)
        names = {str(path)[len(self._root) :].lstrip("/"): int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in names.items() if not PurePosixPath(name).name.startswith(".")}

    def _path(self, name: str) -> str:
        """The full path of a relative name.

        Raises:
            InvalidKeyError: It leads out of the folder.
        """
        path = f"{self._root}/{name}".rstrip("/")
        inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if inside and self._is_local:
            inside = Path(path).resolve().is_relative_to(Path(self._root).resolve())  # a link may lead out
        if not inside:
            raise InvalidKeyError(f"{name!r} leads out of {self}, expected a path within it")
        return path


def _write_aside(path: str, data: bytes | pa.Buffer) -> str:
    """Write the whole content, safe on disk, under a hidden name in the same folder."""
    aside = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return aside


def _sync_folder(path: str) -> None:
    """Make a new name in a folder survive the loss of the machine."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _plain(data: bytes | pa.Buffer) -> bytes:
    return data if isinstance(data, bytes) else data.to_pybytes()
