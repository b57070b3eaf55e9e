"""The index of one run's shared columns: an actor that knows every chunk, and the node whose memory holds it.

A run finds it, or starts it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.ray.actors import create_actor, find_actor, kill_actors
from infra.ray.health import ACTOR_OPTIONS, Pingable
from infra.storage.shared_memory import choose_root
from infra.stores.base import lost_store_error
from infra.stores.chunk_index import ChunkIndex
from infra.stores.prometheus import record_usage
from infra.stores.shared.client import File, Membership, SharedColumnStore
from infra.stores.shared.flight import FlightClient, FlightServer, read_tls
from infra.stores.shared.node_files import ColumnServer, Limits, NodeFiles
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import ChunkNotFoundError, WorkerLostError

_MAINTENANCE_SECONDS = 2.0
_JOIN = "join"
_OPTIONS = {"concurrency_groups": {**ACTOR_OPTIONS["concurrency_groups"], _JOIN: 64}}
_OF_INDEX = ("open", "save_batch", "load_batch", "steps", "chunks", "usage")  # requests that `ChunkIndex` answers
_OF_FILES = ("put", "files", "forget_server", "delete", "clear", "remove")


class StoreIndex(Pingable):
    """The server of `SharedColumnStore`; see `ColumnStore` for the contract of its requests.

    It serves the files of its own node itself, and starts a `ColumnServer` on each other node from which a client
    comes. A chunk is put by one request, once its file is written: it makes the chunk readable.

    Args:
        run_id: The run whose columns these are.
        limits: The store's settings.
        incarnation: The name of this incarnation; None makes a new one.
    """

    def __init__(self, run_id: str, limits: Limits, incarnation: str | None) -> None:
        self._run_id, self._limits = run_id, limits
        self._lock = threading.Condition()  # guards the index and servers; notified when it frees capacity
        self._joining = dict[str, threading.Lock]()  # by node
        self._dropped: list[File] = []  # files that no chunk needs any more
        self._index = ChunkIndex[File](limits.capacity_bytes, incarnation, on_drop=self._dropped.append)
        self._own = NodeFiles(run_id, limits.capacity_bytes, limits.shared_memory)
        handlers = {name: partial(self._ask_index, name) for name in _OF_INDEX}
        handlers |= {name: getattr(self, name) for name in _OF_FILES}
        host = ray.util.get_node_ip_address()
        self._server = FlightServer(host, handlers, self._send, tls=limits.tls)
        self._own_node = ray.get_runtime_context().get_node_id()
        self._places = {self._own_node: (self._server.endpoint.location, str(self._own.path))}
        self._servers = dict[str, tuple[Any, FlightClient]]()  # of the other nodes, by location
        self._reader = SharedColumnStore(run_id, lambda: self._membership(self._places[self._own_node]))
        threading.Thread(target=self._maintenance_loop, daemon=True).start()
        self.end_without_driver(limits.owner, limits.driver_seconds, self.remove)

    @ray.method(concurrency_group=_JOIN)
    def join(self, node: str) -> Membership:
        """Return what a client on a node needs; an actor call. The node gets a column server, unless it has one.

        Servers of several nodes start at the same time: each takes seconds, while ranks wait for each other.
        """
        with self._joining.setdefault(node, threading.Lock()):
            return self._membership(self._places.get(node) or self._start_server(node))

    def _membership(self, place: tuple[str, str]) -> Membership:
        endpoint, timeout = self._server.endpoint, self._limits.put_timeout_seconds
        return Membership(endpoint, self._index.incarnation, *place, timeout)

    def put(self, key: str, num_rows: int, num_bytes: int, file: list[str]) -> dict[str, Any]:
        """Add a chunk that a client has written, once it fits; return its reference.

        If the key is held already, the reference and the file of its chunk are returned for the client to compare; if
        the client's column server is gone, nothing: it has to join again. Files that are not needed are removed.
        """
        written, chunk, index = File(*file), ChunkKey.parse(key), self._index
        with self._lock:
            if not self._serves(written.location):
                return {}
            try:
                self._lock.wait_for(lambda: not index.must_wait(chunk, num_bytes), self._limits.put_timeout_seconds)
                if held := index.find(chunk):
                    self._dropped.append(written)
                    return {"ref": held.ref, "held": held.payload}
                return {"ref": index.add(chunk, num_rows, num_bytes, written)}
            except BaseException:
                self._dropped.append(written)
                raise

    def files(self, refs: list[dict[str, Any]]) -> list[File]:
        """Return where chunks are, in order."""
        with self._lock:
            return self._index.payloads([ChunkRef(**ref) for ref in refs])

    def forget_server(self, location: str) -> bool:
        """Drop the chunks of a column server that a client misses, if it is gone; return whether it is."""
        try:
            self._request(location, "free", [], 0)
        except ConnectionError:
            self._forget(location)
        return not self._serves(location)

    def delete(self, refs: list[dict[str, Any]]) -> int:
        return self._free(lambda: self._index.delete([ChunkRef(**ref) for ref in refs]))

    def clear(self, step: int) -> int:
        return self._free(lambda: self._index.clear(step))

    def remove(self) -> None:
        """Remove all files on all nodes, before this actor is killed."""
        for location in list(self._servers):
            with suppress(ConnectionError):  # its files are removed by the next run on that node
                self._request(location, "remove")
        self._own.remove()

    def _start_server(self, node: str) -> tuple[str, str]:
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(ColumnServer).options(num_cpus=0, max_restarts=0, scheduling_strategy=pinned)
        own, limits = self._server.endpoint, self._limits
        server = actor.remote(self._run_id, limits, own.token)
        location, folder = ray.get(server.place.remote())
        with self._lock:
            self._servers[location] = server, FlightClient(own._replace(location=location))
            self._places[node] = location, folder
        return location, folder

    def _ask_index(self, method: str, *args: Any) -> Any:
        with self._lock:
            return getattr(self._index, method)(*args)

    def _free(self, free: Callable[[], int]) -> int:
        with self._lock:
            num_bytes = free()
            self._lock.notify_all()
        self._remove_dropped()
        return num_bytes

    def _remove_dropped(self) -> None:
        """Remove the files that no chunk needs any more, on all nodes."""
        with self._lock:
            dropped, self._dropped[:] = list(self._dropped), []
            spare = self._index.spare_bytes()
            names: dict[str, list[str]] = {location: [] for location in self._servers}
        for location, name in dropped:
            names.setdefault(location, []).append(name)
        self._own.free(names.pop(self._server.endpoint.location, []), spare)
        for location, of_node in names.items():
            try:
                self._request(location, "free", of_node, spare)
            except ConnectionError:
                self._forget(location)

    def _serves(self, location: str) -> bool:
        """Return whether a column server is one of this store's, as far as is known."""
        return location in {place for place, _ in self._places.values()}

    def _request(self, location: str, method: str, *args: object) -> None:
        """Send a request to the column server of another node; nothing if it is known to be gone."""
        if (server := self._servers.get(location)) is not None:
            server[1].call(method, *args)

    def _forget(self, location: str) -> None:
        """Drop the chunks of a column server that is gone."""
        with self._lock:
            self._servers.pop(location, None)
            self._places = {node: place for node, place in self._places.items() if place[0] != location}
            self._index.drop(lambda file: file.location == location)
            self._dropped[:] = [file for file in self._dropped if file.location != location]
            self._lock.notify_all()

    def _send(self, ticket: dict[str, Any]) -> pa.RecordBatchReader:
        """Return what a ticket asks for: a part of a chunk on this node, or columns of a step's newest handle."""
        if "step" not in ticket:
            return self._own.send(ticket)
        batch = self._reader.load_batch(int(ticket["step"]))
        if batch is None:
            raise ChunkNotFoundError(f"step {ticket['step']} has no columns here; steps: {self._reader.steps()}")
        columns = self._reader.read(batch, ticket.get("columns") or list(batch.columns))
        return pa.RecordBatchReader.from_batches(columns.schema, [columns])

    def _maintenance_loop(self) -> None:
        """Remove the files of puts that failed, and update the metrics periodically."""
        while True:
            self._remove_dropped()
            record_usage(self._run_id, self._ask_index("usage"))
            time.sleep(_MAINTENANCE_SECONDS)


def index_name(identity: str) -> str:
    """Return the name under which every process of the cluster finds the index of the run with that identity."""
    return f"sluice/{identity}/store"


def find_shared_store(run_id: str, identity: str | None = None) -> SharedColumnStore:
    """Return a client of a run's store.

    Args:
        run_id: The run whose columns these are.
        identity: What its index is named by; None: the run's id.

    Raises:
        WorkerLostError: It has no living index.
    """
    _require_ray(run_id)
    if (index := find_actor(index_name(identity or run_id))) is None:
        raise WorkerLostError(f"run {run_id} has no column store in this Ray cluster")
    return _open(run_id, index)


def start_shared_store(
    run_id: str, limits: Limits, *, identity: str | None = None, incarnation: str | None = None
) -> SharedColumnStore:
    """Start the index of a run's store, and return a client; one that is left, but lost, is killed.

    The index runs on this node. It is detached, so it outlives the driver. It is never restarted: a new one is a new
    incarnation of the store, unless a durable tier names the incarnation.

    Args:
        run_id: The run whose columns these are.
        limits: Its settings.
        identity: What the index is named by; None: the run's id.
        incarnation: The name of its incarnation; None makes a new one.

    Raises:
        WorkerLostError: This process isn't connected to Ray, or the index dies.
        ConfigError: The folder or the certificate in the settings can't be used.
    """
    _require_ray(run_id)
    choose_root(limits.shared_memory, limits.capacity_bytes)  # as the index does: its errors and warnings are seen here
    if limits.tls:
        read_tls(limits.tls)
    name = index_name(identity or run_id)
    kill_actors([name])  # it may be stopped, and would never answer
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"scheduling_strategy": here, **_OPTIONS}
    index = create_actor(name, StoreIndex, run_id, limits, incarnation, options=options)
    return _open(run_id, index)


def _require_ray(run_id: str) -> None:
    if not ray.is_initialized():  # otherwise Ray itself would search for a cluster, for minutes
        raise WorkerLostError(f"the column store of run {run_id} can't be reached: this process isn't connected to Ray")


def _open(run_id: str, index: Any) -> SharedColumnStore:
    node = ray.get_runtime_context().get_node_id()
    return SharedColumnStore(run_id, partial(join, run_id, index, node), partial(ray.kill, index))


def join(run_id: str, index: Any, node: str) -> Membership:
    """Return the membership of a client on a node.

    Raises:
        WorkerLostError: The index is gone.
    """
    try:
        return Membership(*index.join.remote(node).future().result())
    except RayActorError as error:
        raise lost_store_error(run_id, error) from None
