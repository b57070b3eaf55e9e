"""A folder on any fsspec file system: atomic and exclusive writes, mapped reads, and no path that leads out of it."""

import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from schemas.errors import InvalidKeyError, PipelineError, RunError, describe

if TYPE_CHECKING:
    import pyarrow as pa

Record = TypeVar("Record", bound=BaseModel)
_UPLOAD_BYTES = 2**26  # that are in memory at a time


@contextmanager
def removed_if_it_fails(path: str | Path) -> Iterator[None]:
    """Remove a file if what writes it fails: on a full disk, it would take the space that others need."""
    try:
        yield
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a hidden file next to `path`, which it then replaces; nothing is left of one that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    with removed_if_it_fails(temporary):
        yield temporary
        os.replace(temporary, path)


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` with `text`: readers and kills see the old file or the new one, never a part of it."""
    with replacing(path) as temporary, open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(str(path))  # else a power failure may bring the old file back, without what was appended to this one


class Folder:
    """Files under one URL, by relative name. Only whole files: a reader sees the old one, the new one, or none.

    Whatever a file system raises, such as missing credentials, is an `OSError` that names the folder.

    Args:
        url: Any fsspec URL, or a local path.
        storage_options: Options that fsspec passes to the file system.
        has_one_writer: Whether no two processes write a file at the same time. What a kill leaves of a local file that
            is being written is then replaced by the next write of it; else it stays, hidden.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], *, has_one_writer: bool = False) -> None:
        # Other processes write here too: a cached listing would be out of date.
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **storage_options)
        self._root = root.rstrip("/")
        self.is_local, self._has_one_writer = isinstance(self._fs, LocalFileSystem), has_one_writer

    def __str__(self) -> str:
        return str(self._fs.unstrip_protocol(self._root))

    @property
    def place(self) -> str:
        """Its local path, or its URL."""
        return self._root if self.is_local else str(self)

    def within(self, name: str) -> "Folder":
        """Return a subfolder, which need not exist.

        Raises:
            InvalidKeyError: The name leads out of this folder.
        """
        subfolder = copy(self)
        subfolder._root = self._path(name)
        return subfolder

    def read(self, name: str) -> bytes | None:
        """Return a small file's content; None if there is no such file."""
        try:
            with self._reached():
                data: bytes = self._fs.cat_file(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of several small files, which are read at the same time if the file system can do that.

        Raises:
            FileNotFoundError: One of them doesn't exist.
        """
        paths = [self._path(name) for name in names]
        if not paths:
            return []
        with self._reached():
            return [bytes(data) for data in self._fs.cat_ranges(paths, None, None, on_error="raise")]

    def read_existing(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those of several small files that exist, by name, in order; see `read_all`."""
        paths = [self._path(name) for name in names]
        with self._reached():
            found = self._fs.cat_ranges(paths, None, None, on_error="return") if paths else []
            for data in found:
                if isinstance(data, BaseException) and not isinstance(data, FileNotFoundError):
                    raise data
        return {name: bytes(data) for name, data in zip(names, found, strict=True) if not isinstance(data, OSError)}

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if there is no such file."""
        try:
            with self._reached():
                return int(self._fs.size(self._path(name)))
        except FileNotFoundError:
            return None

    def modified(self, name: str) -> float | None:
        """Return when a file was last written, Unix time by the file system's clock; None if there is no such file."""
        try:
            with self._reached():
                return float(self._fs.modified(self._path(name)).timestamp())
        except FileNotFoundError:
            return None

    def map(self, name: str) -> "pa.Buffer | None":
        """Map a local file; return None on a remote file system."""
        if not self.is_local:
            return None
        import pyarrow as pa  # not at the top: a run's small files are read without it

        with pa.memory_map(self._path(name)) as file:
            return file.read_buffer()

    def map_copy(self, name: str) -> "pa.Buffer":
        """Map a file; of a remote file system, a copy on this machine's disk, which is gone with the last reader.

        Raises:
            OSError: There is no such file, or it can't be read.
        """
        import pyarrow as pa  # not at the top: see `map`

        if (mapped := self.map(name)) is not None:
            return mapped
        with tempfile.NamedTemporaryFile(prefix="sluice-") as file:
            with self._reached():
                self._fs.get_file(self._path(name), file.name)
            with pa.memory_map(file.name) as copied:
                return copied.read_buffer()

    def read_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read byte ranges of a file, in one request if the file system supports it."""
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        with self._reached():
            found = self._fs.cat_ranges([self._path(name)] * len(ranges), starts, stops, on_error="raise")
        return [bytes(data) for data in found]

    def write(self, name: str, data: "bytes | pa.Buffer", mode: int = 0o666) -> None:
        """Replace a file.

        Args:
            name: The file.
            data: Its new content.
            mode: Its permissions, less the umask, if it is local.
        """
        path = self._path(name)
        if self.is_local:
            temporary = f".{os.path.basename(path)}.tmp" if self._has_one_writer else _unique_name()
            os.replace(_write_temporary(path, data, temporary, mode), path)
            sync_folder(path)
        else:
            with self._reached():
                self._fs.pipe_file(path, data if isinstance(data, bytes) else data.to_pybytes())

    def write_large(self, name: str, data: "pa.Buffer") -> None:
        """Replace a file by what memory need not hold at once, such as a mapped buffer.

        On a remote file system, a kill may leave a part of it: write what tells readers of it afterwards.
        """
        if self.is_local:
            self.write(name, data)
            return
        content = memoryview(data)
        with self._reached(), self._fs.open(self._path(name), "wb") as file:
            for start in range(0, len(content), _UPLOAD_BYTES):
                file.write(content[start : start + _UPLOAD_BYTES])

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet: of two writers, one wins.

        Raises:
            FileExistsError: It exists.
        """
        path = self._path(name)
        if not self.is_local:
            with self._reached():
                self._fs.pipe_file(path, data, mode="create")
            return
        temporary = _write_temporary(path, data, _unique_name())
        try:
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
        sync_folder(path)

    def link(self, source: "Folder", name: str) -> bool:
        """Have a file of another folder here, too, under the same name, without a copy; return whether that works.

        It does for new files if both folders are local, on a file system with hard links.
        """
        if not (self.is_local and source.is_local):
            return False
        path = self._path(name)
        make_folder(os.path.dirname(path))
        try:
            os.link(source._path(name), path)
        except OSError:
            return False
        return True

    def sync(self, name: str) -> None:
        """Make a file that something else has written survive a power failure, if it exists and is local.

        So do the names of it and of the folders in between, which may be new.
        """
        if not self.is_local:
            return
        path = self._path(name)
        with suppress(FileNotFoundError):
            _sync(path)
            for folder in PurePosixPath(name).parents:
                _sync(self._path(str(folder)))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            with self._reached():
                self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove several files, as far as they exist: at the same time, or by one request, if the file system can."""
        if self.is_local or not names:
            for name in names:
                self.remove(name)
            return
        try:
            with self._reached():
                self._fs.rm([self._path(name) for name in names])
        except FileNotFoundError:  # of one of them
            for name in names:
                self.remove(name)

    def remove_folder(self, name: str) -> None:
        """Remove a subfolder with everything in it, if it exists; one that is being written to stays."""
        with suppress(OSError), self._reached():
            self._fs.rm(self._path(name), recursive=True)

    def subfolders(self) -> list[str]:
        """Return the names of the folders directly in this one, sorted; links to folders are among them."""
        try:
            with self._reached():
                found = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(PurePosixPath(str(info["name"])).name for info in found if info["type"] != "file")

    def sizes(self, within: str = "", *, only_linked: bool = False, unfinished: bool = False) -> dict[str, int]:
        """Return the size in bytes of every file in a subfolder, by name relative to this folder.

        Files that are being written, or whose writers were killed, are listed only if `unfinished` ones are asked for.
        With `only_linked`, only files that are elsewhere, too, by hard links.
        """
        with self._reached():
            found = self._fs.find(self._path(within), detail=True)
        names = {
            str(path)[len(self._root) :].lstrip("/"): int(info["size"])
            for path, info in found.items()
            if not only_linked or info.get("nlink", 1) > 1
        }
        return {
            name: size for name, size in names.items() if unfinished or not PurePosixPath(name).name.startswith(".")
        }

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn the errors of a file system's client, which have no common class, into `OSError`."""
        try:
            yield
        except (OSError, PipelineError):
            raise
        except Exception as error:
            raise OSError(f"{self} can't be reached: {describe(error)}") from error

    def _path(self, name: str) -> str:
        """Return the full path of a relative name."""
        path = f"{self._root}/{name}".rstrip("/")
        is_inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if is_inside and self.is_local:
            is_inside = Path(path).resolve().is_relative_to(Path(self._root).resolve())  # a link may lead out
        if not is_inside:
            raise InvalidKeyError(f"{name!r} leads out of {self}, expected a path within it")
        return path


def _unique_name() -> str:
    return f".{uuid.uuid4().hex}.tmp"


def _write_temporary(path: str, data: "bytes | pa.Buffer", name: str, mode: int = 0o666) -> str:
    """Write the whole content, synced to disk, under a hidden name in the same folder; return its path."""
    temporary = os.path.join(os.path.dirname(path), name)
    make_folder(os.path.dirname(path))
    with (
        removed_if_it_fails(temporary),
        open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def make_folder(path: str) -> None:
    """Make a folder, if it doesn't exist, and those above it; their names survive a power failure."""
    if path and not os.path.isdir(path):
        make_folder(os.path.dirname(path))
        os.makedirs(path, exist_ok=True)
        sync_folder(path)


def sync_folder(path: str) -> None:
    """Sync the folder of `path`, so that the file's name survives a power failure."""
    _sync(os.path.dirname(path) or ".")


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in a folder, and itself."""
    for path, _, files in os.walk(folder):
        for name in files:
            _sync(os.path.join(path, name))
        _sync(path)


def _sync(path: str) -> None:
    """Sync a file or a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_record(folder: Folder, name: str, model: type[Record], advice: str) -> Record | None:
    """Return what a small JSON file holds; None if there is no such file.

    Raises:
        RunError: It is damaged; the message ends with `advice`.
    """
    content = folder.read(name)
    try:
        return None if content is None else model.model_validate_json(content)
    except ValidationError as error:
        raise RunError(f"{folder.place}/{name} is damaged: {error.errors()[0]['msg']}; {advice}") from None
