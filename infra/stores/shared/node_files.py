"""A run's chunk files in one node's memory: who writes them, maps them and removes them, and their server.

The column server, one per run and node, owns the files there, and sends parts of them to other nodes.

A removed file's memory is reused for a later one, as most of the time of a write goes into new memory: the file is
moved to a pool, and a writer takes it from there. It writes only into a file that no process has open or maps, which
the kernel tells by granting a lease; so what a read has returned never changes.
"""

import errno
import fcntl
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from infra.processes import take_all_files
from infra.storage.shared_memory import SharedFolder, choose_root
from infra.stores.base import chunk_not_found_error
from infra.stores.chunk_reads import ChunkPart, ChunkRead, check_num_rows, decode_chunk
from infra.stores.shared.flight import Endpoint, FlightClient, FlightServer, Handler, Tls
from rl_core.columns import codec
from rl_core.columns.gather import Ints, ranges
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import CapacityError, StoreError

_POOL = "pool"
_FREE, _WRITTEN = ".arrow", ".new"  # suffixes of the pool's files: free to reuse, being written
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
        take_all_files()  # every worker of the run connects to its server
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
        for size, path in sorted(_files(self.path / _POOL, _FREE), reverse=True):
            kept += size
            if size < _MIN_POOLED_BYTES or kept > spare_bytes:
                path.unlink(missing_ok=True)  # a writer may have taken it just now
                kept -= size
        for _, path in _files(self.path / _POOL, _WRITTEN):
            if (file := _open_unused(path)) is not None:  # its writer has died
                with file:
                    path.unlink(missing_ok=True)

    def send(self, ticket: dict[str, Any]) -> pa.RecordBatchReader:
        """Return the part of a chunk that a ticket of `RemoteColumns` asks for."""
        ref = ChunkRef(**ticket["ref"])
        data = map_chunk(self.path / os.path.basename(ticket["name"]), ref)
        columns = decode_chunk(ref, data, ticket["columns"])
        check_num_rows(ref, columns)  # here, as the rows that are not asked for don't reach the client
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
        raise chunk_not_found_error(ref) from None


def write_chunk(key: ChunkKey, folder: Path, columns: pa.RecordBatch, timeout_seconds: float) -> tuple[str, int]:
    """Write a chunk's file, once the file system has room; return the file's name in the folder, and its bytes.

    Args:
        key: The chunk's name, for errors.
        folder: The folder of a `NodeFiles`.
        columns: The chunk.
        timeout_seconds: How long to wait for space.

    Raises:
        FileNotFoundError: The folder is gone.
        CapacityError: The file system stayed full.
        StoreError: The file can't be written.
    """
    num_bytes = codec.encoded_bytes(columns)
    try:
        return _write_file(folder, num_bytes, columns, timeout_seconds), num_bytes
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CapacityError(
                f"can't put {key}: the file system of {folder} is full; enlarge it (for Docker: --shm-size), lower "
                "store.capacity_bytes, or set runtime.shared_memory to a folder with more space"
            ) from None
        raise StoreError(f"can't put {key}: {folder}: {error.strerror or error}") from None


def _write_file(folder: Path, num_bytes: int, columns: pa.RecordBatch, timeout_seconds: float) -> str:
    """Write columns into a new file of `num_bytes`, of reused memory if there is any; return the file's name.

    The `OSError` is ENOSPC if the file system stayed full, ENOENT if the folder is gone.
    """
    deadline = time.monotonic() + timeout_seconds
    name = f"{uuid.uuid4().hex}.arrow"
    path = (folder / _POOL / name).with_suffix(_WRITTEN)  # once its writer has died, `NodeFiles.free` removes it
    while True:
        try:
            file = _reuse(path, num_bytes) or FileIO(path, "x+")
            with file, pa.PythonFile(file, "w") as sink:
                codec.write(columns, sink)
                file.truncate(num_bytes)
                path.rename(folder / name)
            return name
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise
        for _, pooled in _files(path.parent, _FREE):
            pooled.unlink(missing_ok=True)
        time.sleep(_RETRY_SECONDS)


def _reuse(path: Path, num_bytes: int) -> FileIO | None:
    """Take a file of about this size from the pool and name it `path`, if no process has it open or maps it."""
    pooled = _files(path.parent, _FREE) if num_bytes >= _MIN_POOLED_BYTES else []
    if not pooled:
        return None
    _, nearest = min(pooled, key=lambda found: abs(found[0] - num_bytes))
    try:
        nearest.rename(path)
    except FileNotFoundError:  # another writer has taken it
        return None
    if (file := _open_unused(path)) is None:
        path.unlink(missing_ok=True)
    return file


def _open_unused(path: Path) -> FileIO | None:
    """Open a file if nobody has it open or maps it."""
    try:
        file = FileIO(path, "r+")
    except FileNotFoundError:
        return None
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # if it is opened just now; the usual signal would kill
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # it is used, or this file system has no leases
        file.close()
        return None
    return file


def _files(pool: Path, suffix: str) -> list[tuple[int, Path]]:
    """Return the pool's files of this kind with their sizes."""
    found = []
    with os.scandir(pool) as entries:
        for entry in entries:
            try:
                if entry.name.endswith(suffix):
                    found.append((entry.stat().st_size, Path(entry.path)))
            except FileNotFoundError:
                continue
    return found


class Limits(NamedTuple):
    """The settings of a store."""

    capacity_bytes: int  # the limit on the bytes of all held chunks together
    put_timeout_seconds: float  # how long a put waits for other steps to be cleared
    shared_memory: str | None = None  # `runtime.shared_memory`
    tls: Tls | None = None  # see `FlightServer`
    owner: str = ""  # who started the run
    driver_seconds: float = math.inf  # `timeouts.driver_seconds`


class ColumnServer:
    """The actor that serves a node's files, pinned to it; it imports no model code."""

    def __init__(self, run_id: str, limits: Limits, token: str) -> None:
        import ray

        self._files = NodeFiles(run_id, limits.capacity_bytes, limits.shared_memory)
        handlers: dict[str, Handler] = {"free": self._files.free, "remove": self._files.remove}
        host = ray.util.get_node_ip_address()
        self._server = FlightServer(host, handlers, self._files.send, token=token, tls=limits.tls)

    def place(self) -> tuple[str, str]:
        """Return the server's location, and the folder that it serves."""
        return self._server.endpoint.location, str(self._files.path)


class RemoteColumns:
    """This process's connections to the column servers of other nodes.

    Args:
        index: The endpoint of the run's index, whose token and certificate they share.
    """

    def __init__(self, index: Endpoint) -> None:
        self._index, self._clients, self._lock = index, dict[str, FlightClient](), threading.Lock()

    def read(self, location: str, name: str, ref: ChunkRef, read: ChunkRead | None) -> pa.RecordBatch:
        """Fetch parts of a chunk, each with one request, or all of it, and no other columns or rows.

        Other rows of the result are null.

        Raises:
            StoreError: The chunk does not exist there, or is damaged.
            ConnectionError: The server is gone.
        """
        parts = [self._read_part(location, name, ref, part) for part in (read.parts if read else (None,))]
        names = [name for part in parts for name in part.schema.names]
        return pa.RecordBatch.from_arrays([column for part in parts for column in part.columns], names=names)

    def _read_part(self, location: str, name: str, ref: ChunkRef, part: ChunkPart | None) -> pa.RecordBatch:
        starts, stops = _merge(part.starts, part.stops) if part else (np.array([0]), np.array([ref.num_rows]))
        received = self._client(location).get(
            {
                "name": name,
                "ref": ref.model_dump(),
                "columns": sorted(part.names) if part else None,
                "rows": list(zip(starts.tolist(), stops.tolist(), strict=True)),
            }
        )
        if received.num_rows == ref.num_rows:
            return received
        rows = np.full(ref.num_rows, -1)
        rows[ranges(starts, stops - starts)] = np.arange(received.num_rows)
        return received.take(pa.array(rows, mask=rows < 0))

    def _client(self, location: str) -> FlightClient:
        with self._lock:
            if location not in self._clients:
                self._clients[location] = FlightClient(self._index._replace(location=location))
            return self._clients[location]


def _merge(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Return the same rows as ranges in order that don't touch."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] > stops[:-1]]))
    ends = np.concatenate([begins[1:] - 1, [len(stops) - 1]]).astype(np.int64)
    return starts[begins], stops[ends]
