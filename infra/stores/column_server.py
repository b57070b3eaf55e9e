"""The column server of one run on one node: it owns the chunk files there, and sends parts of them to other nodes."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infra.storage.shared_memory import SharedFolder, choose_root
from infra.stores.chunk_errors import chunk_not_found_error
from infra.stores.chunk_reads import ChunkRead, decode_chunk
from infra.stores.flight import Endpoint, FlightClient, FlightServer, Handler, Tls
from rl_core.columns.gather import Ints, ranges
from schemas.batch import ChunkRef


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

    def remove(self) -> None:
        """Remove all files; what is mapped stays readable."""
        self._folder.remove()

    def unlink(self, names: Sequence[str]) -> None:
        """Remove files; those that don't exist are ignored."""
        for name in names:
            (self.path / os.path.basename(name)).unlink(missing_ok=True)

    def send(self, ticket: dict[str, Any]) -> pa.RecordBatchReader:
        """Return the part of a chunk that a ticket of `RemoteColumns` asks for."""
        ref = ChunkRef(**ticket["ref"])
        data = map_chunk(self.path / os.path.basename(ticket["name"]), ref)
        columns = decode_chunk(ref, data, ticket["columns"])
        pieces = [columns.slice(start, stop - start) for start, stop in ticket["rows"]]
        return pa.RecordBatchReader.from_batches(columns.schema, pieces)


class ColumnServer:
    """The actor that serves a node's files, pinned to it; it imports no model code.

    Args:
        run_id: The run.
        capacity_bytes: The most that the files will take.
        shared_memory: `runtime.shared_memory`.
        token: The run's token.
        tls: See `FlightServer`.
    """

    def __init__(
        self, run_id: str, capacity_bytes: int, shared_memory: str | None, token: str, tls: Tls | None
    ) -> None:
        import ray

        self._files = NodeFiles(run_id, capacity_bytes, shared_memory)
        handlers: dict[str, Handler] = {"unlink": self._unlink, "remove": self._remove}
        host = ray.util.get_node_ip_address()
        self._server = FlightServer(host, handlers, self._files.send, token=token, tls=tls)

    def place(self) -> tuple[str, str]:
        """Return the server's location, and the folder that it serves."""
        return self._server.endpoint.location, str(self._files.path)

    def _unlink(self, _: int, names: list[str]) -> None:
        self._files.unlink(names)

    def _remove(self, _: int) -> None:
        self._files.remove()


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
