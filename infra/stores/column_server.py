"""The column server of one run on one node: it owns the chunk files there, and sends parts of them to other nodes."""

import threading

import numpy as np
import pyarrow as pa

from infra.stores.chunk_reads import ChunkRead
from infra.stores.flight import Endpoint, FlightClient, FlightServer, Handler, Tls
from infra.stores.node_files import NodeFiles
from rl_core.columns.gather import Ints, ranges
from schemas.batch import ChunkRef


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
        handlers: dict[str, Handler] = {"free": self._free, "remove": self._remove}
        host = ray.util.get_node_ip_address()
        self._server = FlightServer(host, handlers, self._files.send, token=token, tls=tls)

    def place(self) -> tuple[str, str]:
        """Return the server's location, and the folder that it serves."""
        return self._server.endpoint.location, str(self._files.path)

    def _free(self, _: int, names: list[str], spare_bytes: int) -> None:
        self._files.free(names, spare_bytes)

    def _remove(self, _: int) -> None:
        self._files.remove()


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
