"""The column server of one run on one node: it owns the chunk files there, and sends parts of them elsewhere."""

import math
import threading
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from infra.ray.module_path import enter_working_directory
from infra.stores.chunk_reads import ChunkRead
from infra.stores.flight import Endpoint, FlightClient, FlightServer, Handler, Tls
from infra.stores.node_files import NodeFiles
from rl_core.columns.gather import Ints, ranges
from schemas.batch import ChunkKey, ChunkRef


class Limits(NamedTuple):
    """The settings of a store.

    Attributes:
        capacity_bytes: The limit on the bytes of all held chunks together.
        put_timeout_seconds: How long a put waits for other steps to be cleared.
        lease_seconds: How long a lease lasts unless it is renewed.
        shared_memory: `runtime.shared_memory`.
        tls: See `FlightServer`.
        owner: Who started the run.
        orphan_seconds: `runtime.orphan_seconds`.
    """

    capacity_bytes: int
    put_timeout_seconds: float
    lease_seconds: float
    shared_memory: str | None = None
    tls: Tls | None = None
    owner: str = ""
    orphan_seconds: float = math.inf


class ColumnServer:
    """The actor that serves a node's files, pinned to it; it imports no model code.

    Args:
        run_id: The run.
        limits: The store's settings.
        token: The run's token.
    """

    def __init__(self, run_id: str, limits: Limits, token: str) -> None:
        import ray

        enter_working_directory()
        self._files = NodeFiles(run_id, limits.capacity_bytes, limits.shared_memory)
        handlers: dict[str, Handler] = {"free": self._files.free, "remove": self._files.remove}
        host = ray.util.get_node_ip_address()
        files = self._files
        self._server = FlightServer(host, handlers, files.send, files.receive, token=token, tls=limits.tls)

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

    def read(self, location: str, name: str, ref: ChunkRef, part: ChunkRead | None) -> pa.RecordBatch:
        """Fetch a part of a chunk, or all of it, and no other columns or rows; other rows of the result are null.

        Raises:
            StoreError: The chunk does not exist there, or is damaged.
            ConnectionError: The server is gone.
        """
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

    def write(self, location: str, key: ChunkKey, columns: pa.RecordBatch, timeout_seconds: float) -> tuple[str, int]:
        """Have a server write a chunk's file on its node; see `write_chunk`.

        Raises:
            StoreError: The file can't be written.
            ConnectionError: The server is gone.
        """
        ticket = {"key": str(key), "timeout_seconds": timeout_seconds}
        name, num_bytes = self._client(location).put(ticket, columns)
        return str(name), int(num_bytes)

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
