"""A run's chunk files in one node's memory: who writes them, maps them and removes them.

A removed file's memory is reused for a later one, as most of the time of a write goes into new memory: the file is
moved to a pool, and a writer takes it from there under a new name. It writes only into a file that no process has open
or maps, which the kernel tells by granting a lease; so what a read has returned never changes.
"""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from infra.storage.shared_memory import SharedFolder, choose_root
from infra.stores.chunk_errors import chunk_not_found_error
from infra.stores.chunk_reads import decode_chunk
from schemas.batch import ChunkRef

_POOL = "free"
_MIN_POOLED_BYTES = 2**18  # smaller files are written as fast into new memory
_RETRY_SECONDS = 0.2  # between attempts to write into full memory


class NodeFiles:
    """One run's chunk files on this node.

    Args:
        run_id: The run.
        capacity_bytes: The most that they will take.
        shared_memory: `runtime.shared_memory`.
    """

    def __init__(self, run_id: str, capacity_bytes: int, shared_memory: str | None) -> None:
        self._folder = SharedFolder(choose_root(shared_memory, capacity_bytes), run_id)
        self.path = self._folder.path
        (self.path / _POOL).mkdir()

    def remove(self) -> None:
        """Remove all files; what is mapped stays readable."""
        self._folder.remove()

    def free(self, names: Sequence[str], spare_bytes: int) -> None:
        """Remove files; those that don't exist are ignored. Of their memory, keep at most `spare_bytes` for reuse."""
        for name in map(os.path.basename, names):
            try:
                os.rename(self.path / name, self.path / _POOL / name)
            except FileNotFoundError:
                continue
        kept = 0
        for size, path in sorted(_sizes(self.path / _POOL), reverse=True):
            kept += size
            if size < _MIN_POOLED_BYTES or kept > spare_bytes:
                path.unlink(missing_ok=True)  # a writer may have taken it just now
                kept -= size

    def send(self, ticket: dict[str, Any]) -> pa.RecordBatchReader:
        """Return the part of a chunk that a ticket of `RemoteColumns` asks for."""
        ref = ChunkRef(**ticket["ref"])
        data = map_chunk(self.path / os.path.basename(ticket["name"]), ref)
        columns = decode_chunk(ref, data, ticket["columns"])
        pieces = [columns.slice(start, stop - start) for start, stop in ticket["rows"]]
        return pa.RecordBatchReader.from_batches(columns.schema, pieces)


def map_chunk(path: Path, ref: ChunkRef) -> pa.Buffer:
    """Map a chunk's file, read-only; the mapping stays valid when the file is removed.

    Raises:
        ChunkNotFoundError: The file does not exist: its step was cleared just now.
    """
    try:
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()
    except FileNotFoundError:
        raise chunk_not_found_error(ref, lease_expired=False) from None


def write_file(path: Path, num_bytes: int, write: Callable[[pa.NativeFile], object], timeout_seconds: float) -> None:
    """Write a file of `num_bytes`, into reused memory if there is any; wait while the file system is full.

    Args:
        path: The file, in the folder of a `NodeFiles`.
        num_bytes: Its size.
        write: Writes all of it.
        timeout_seconds: How long to wait for space.

    Raises:
        OSError: The file can't be written: ENOSPC, the file system stayed full; ENOENT, the folder is gone.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            file = os.fdopen(_open(path, num_bytes), "r+b", buffering=0)
            with file, pa.PythonFile(file, "w") as sink:
                write(sink)
                file.truncate(num_bytes)
            return
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise
        for _, pooled in _sizes(path.parent / _POOL):
            pooled.unlink(missing_ok=True)
        time.sleep(_RETRY_SECONDS)


def _open(path: Path, num_bytes: int) -> int:
    """Return a descriptor of a new file, or of a removed one of about this size that nobody reads any more."""
    pooled = _sizes(path.parent / _POOL) if num_bytes >= _MIN_POOLED_BYTES else []
    if pooled:
        _, nearest = min(pooled, key=lambda found: abs(found[0] - num_bytes))
        if (descriptor := _reuse(nearest, path)) is not None:
            return descriptor
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _reuse(pooled: Path, path: Path) -> int | None:
    """Take a file from the pool under a new name, if no process has it open or maps it."""
    try:
        os.rename(pooled, path)
    except FileNotFoundError:  # another writer has taken it
        return None
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # if it is opened just now; the usual signal would kill
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # it is read, or this file system has no leases
        os.close(descriptor)
        path.unlink()
        return None
    return descriptor


def _sizes(pool: Path) -> list[tuple[int, Path]]:
    """Return the files of the pool with their sizes."""
    found = []
    with os.scandir(pool) as entries:
        for entry in entries:
            try:
                found.append((entry.stat().st_size, Path(entry.path)))
            except FileNotFoundError:
                continue
    return found
