"""A folder on any fsspec file system: atomic and exclusive writes, mapped reads, and no path that leads out of it."""

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
    """Files under one URL, by relative name. Only whole files: a reader sees the old one, the new one, or none.

    Args:
        url: Any fsspec URL, or a local path.
        storage_options: Options that fsspec passes to the file system.
    """

    def __init__(self, url: str, storage_options: dict[str, Any]) -> None:
        # Other processes write here too: a cached listing would be out of date.
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **storage_options)
        self._root = root.rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def __str__(self) -> str:
        return str(self._fs.unstrip_protocol(self._root))

    def read(self, name: str) -> bytes | None:
        """Return a small file's content; None if there is no such file."""
        try:
            data: bytes = self._fs.cat_file(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if there is no such file."""
        try:
            return int(self._fs.size(self._path(name)))
        except FileNotFoundError:
            return None

    def map(self, name: str) -> pa.Buffer | None:
        """Map a local file; return None on a remote file system."""
        if not self._is_local:
            return None
        with pa.memory_map(self._path(name)) as file:
            return file.read_buffer()

    def read_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read byte ranges of a file, in one request if the file system supports it."""
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        found = self._fs.cat_ranges([self._path(name)] * len(ranges), starts, stops, on_error="raise")
        return [bytes(data) for data in found]

    def write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Replace a file."""
        path = self._path(name)
        if self._is_local:
            os.replace(_write_temporary(path, data), path)
            _sync_folder(path)
        else:
            self._fs.pipe_file(path, _as_bytes(data))

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet: of two writers, one wins.

        Raises:
            FileExistsError: It exists.
        """
        path = self._path(name)
        if not self._is_local:
            self._fs.pipe_file(path, data, mode="create")
            return
        temporary = _write_temporary(path, data)
        try:
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
        _sync_folder(path)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove a subfolder with everything in it, if it exists; one that is being written to stays."""
        with suppress(OSError):
            self._fs.rm(self._path(name), recursive=True)

    def sizes(self, within: str = "") -> dict[str, int]:
        """Return the size in bytes of every file in a subfolder, by name relative to this folder.

        Files that are still being written are not listed.
        """
        found = self._fs.find(self._path(within), detail=True)
        names = {str(path)[len(self._root) :].lstrip("/"): int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in names.items() if not PurePosixPath(name).name.startswith(".")}

    def _path(self, name: str) -> str:
        """Return the full path of a relative name.

        Raises:
            InvalidKeyError: It leads out of the folder.
        """
        path = f"{self._root}/{name}".rstrip("/")
        is_inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if is_inside and self._is_local:
            is_inside = Path(path).resolve().is_relative_to(Path(self._root).resolve())  # a link may lead out
        if not is_inside:
            raise InvalidKeyError(f"{name!r} leads out of {self}, expected a path within it")
        return path


def _write_temporary(path: str, data: bytes | pa.Buffer) -> str:
    """Write the whole content, synced to disk, under a hidden name in the same folder; return its path."""
    temporary = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _sync_folder(path: str) -> None:
    """Sync the folder of `path`, so that the file's name survives a power failure."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _as_bytes(data: bytes | pa.Buffer) -> bytes:
    return data if isinstance(data, bytes) else data.to_pybytes()
