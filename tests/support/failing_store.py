"""An fsspec file system whose files are local, and whose requests fail as long as a file named `FAILING` exists.

A run reaches it by the URL `failing:///.../bucket/...`: it is installed for the run's processes as other fsspec file
systems are, by an entry point.
"""

import errno
import os
import uuid
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem, register_implementation
from fsspec.implementations.local import LocalFileSystem

PROTOCOL, BUCKET = "failing", "bucket"
FAILING, HAS_FAILED = ".failing", ".has-failed"  # in the bucket
_ENTRY_POINTS = f"[fsspec.specs]\n{PROTOCOL} = {__name__}:FailingFileSystem\n"


def install(folder: Path) -> Path:
    """Make the bucket and the installed package in a folder; return what belongs on the processes' PYTHONPATH."""
    (folder / BUCKET).mkdir()
    package = folder / "packages" / "failing_store-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-store\nVersion: 0\n")
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    register_implementation(PROTOCOL, FailingFileSystem, clobber=True)  # for this process
    return package.parent


class FailingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Local files with an object store's semantics: a file is written whole, or not at all."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem()

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        """List a folder."""
        return self._local.ls(self._checked(path), detail=detail)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return a file's size and type."""
        return dict(self._local.info(self._checked(path)))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._local.rm_file(self._checked(path))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self._local.rmdir(self._checked(path))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a whole file; with the mode "create" it must not exist."""
        path = self._checked(path)
        temporary = f"{_bucket(path)}/../.{uuid.uuid4().hex}"
        Path(temporary).write_bytes(value)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if mode == "create":
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return self._local.open(self._checked(path), mode)

    def _checked(self, path: str) -> str:
        path = self._strip_protocol(path)
        bucket = Path(_bucket(path))
        if (bucket / FAILING).exists():
            (bucket / HAS_FAILED).touch()
            raise OSError(errno.EIO, "the object store answers with an internal error", path)
        return path


def _bucket(path: str) -> str:
    return f"{path.partition(f'/{BUCKET}/')[0]}/{BUCKET}"
