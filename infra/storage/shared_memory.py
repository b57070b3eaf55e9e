"""Folders of files in a node's memory, which every process of the node maps."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from schemas.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")

logger = logging.getLogger(__name__)


def choose_root(configured: str | None, num_bytes: int) -> Path:
    """Return the folder for a run's shared files on this node, private to the user.

    Args:
        configured: `runtime.shared_memory`; None: shared memory if it has space for `num_bytes`, else a folder on disk,
            with a warning.
        num_bytes: The most that the files will take together.

    Raises:
        ConfigError: The folder can't be made, or belongs to another user.
    """
    if configured is not None:
        return _private_folder(Path(configured))
    free, _ = space(SHARED_MEMORY)
    if free >= num_bytes:
        return _private_folder(SHARED_MEMORY)
    disk = Path(tempfile.gettempdir())
    logger.warning(
        "shared memory (%s) has %d MiB free, but up to %d MiB are needed (columns: store.capacity_bytes): files in %s "
        "are used, which is slower; enlarge it (for Docker: --shm-size), or set runtime.shared_memory",
        *(SHARED_MEMORY, free // 2**20, -(-num_bytes // 2**20), disk),
    )
    return _private_folder(disk)


class SharedFolder:
    """A folder of files that belong to this process. If it is killed, the next one to be made under `root` removes it.

    Args:
        root: A folder of `choose_root`.
        name: The beginning of the folder's name.
    """

    def __init__(self, root: Path, name: str) -> None:
        with _locked(root / "lock"):
            remove_dead_folders(root)
            self.path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
            self._lock = _lock(self.path / "lock")

    def remove(self) -> None:
        """Remove the folder; what is mapped stays readable."""
        shutil.rmtree(self.path, ignore_errors=True)


def space(path: Path) -> tuple[int, int]:
    """Return the free bytes of a file system, and all of them; zeros if it isn't there."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0, 0
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def remove_left_over() -> None:
    """Remove what processes that were killed have left where files are by default."""
    for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        root = parent / _folder_name()
        if root.is_dir():
            with _locked(root / "lock"):
                remove_dead_folders(root)


def remove_dead_folders(root: Path) -> None:
    """Remove the folders under `root` whose processes have died."""
    for path in root.iterdir():
        if path.is_dir() and not _is_locked(path / "lock"):
            shutil.rmtree(path, ignore_errors=True)


def _private_folder(parent: Path) -> Path:
    root = parent / _folder_name()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise ConfigError(f"{root} can't be made: {error.strerror}; set another runtime.shared_memory") from None
    if status.st_uid != os.getuid() or not root.is_dir() or root.is_symlink():
        raise ConfigError(f"{root} is not a folder of this user; set another runtime.shared_memory")
    return root


def _folder_name() -> str:
    return f"sluice-{os.getuid()}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock(path: Path) -> TextIO:
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies
    return file


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
