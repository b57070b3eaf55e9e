"""The registry actor of one run: it owns the chunks in Ray's object store, and indexes them.

Ray finds it, keeps it alive and identifies it as the owner; requests use an RPC connection, which is faster.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from infra.ray import object_store
from infra.ray.object_store import Location
from infra.stores.chunk_errors import object_store_full_error
from infra.stores.chunk_index import ChunkIndex, Entry
from infra.stores.prometheus import record_usage
from infra.stores.ray_writers import WriterTasks
from infra.stores.rpc import Endpoint, RpcServer
from schemas.batch import ChunkKey, ChunkRef

Payload = ray.ObjectRef[bytes]
_MAINTENANCE_SECONDS = 2.0


class RayStoreRegistry:
    """The server of `RayColumnStore`; see `ColumnStore` for the contract of its requests.

    A chunk is put in two requests: `begin_put` reserves its key and its bytes, `end_put` makes it readable. A put that
    a client began and did not end is released when its connection closes, as it does when its process dies.

    Args:
        run_id: The run whose columns these are.
        capacity_bytes: The limit on the bytes of all held chunks together.
        put_timeout_seconds: How long a put waits for other steps to be cleared.
        lease_seconds: How long a lease lasts unless it is renewed.
        incarnation: The name of this incarnation; None makes a new one.
        clock: Returns the time in seconds, by which leases expire.
    """

    def __init__(
        self,
        run_id: str,
        capacity_bytes: int,
        put_timeout_seconds: float,
        lease_seconds: float,
        incarnation: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id, self._put_timeout, self._lease_seconds = run_id, put_timeout_seconds, lease_seconds
        self._index = ChunkIndex[Payload](capacity_bytes, lease_seconds, incarnation, clock)
        self._lock = threading.Condition()  # guards the index and the puts in progress; notified when they change
        self._puts: dict[str, int] = {}  # key of each put in progress -> its connection
        self._writers = WriterTasks(self._lock, self._drop)
        handlers = {name: getattr(self, name) for name in _REQUESTS}
        self._server = RpcServer(ray.util.get_node_ip_address(), handlers, self._release_all)
        threading.Thread(target=self._maintenance_loop, daemon=True).start()

    def endpoint(self) -> tuple[Endpoint, str, str]:
        """Return where requests go, this registry's own id, and its incarnation. An actor call, like `add_writer`."""
        return self._server.endpoint, self._writers.registry_id, self._index.incarnation

    def ping(self) -> tuple[str, int]:
        """Return this actor's node and process id; see `infra.ray.health`."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def add_writer(self, actor_id: str, writer: Any) -> None:
        """Register an actor that will put large chunks; `writer` is its handle."""
        self._writers.add_writer(actor_id, writer)

    def open_lease(self, _: int, step: int) -> None:
        with self._lock:
            self._index.open_lease(step)

    def begin_put(self, connection: int, name: str, num_bytes: int) -> dict[str, Any] | None:
        """Reserve a key and its bytes; if the key is held already, return its chunk for the client to compare."""
        key = ChunkKey.parse(name)
        with self._lock:
            if held := self._admit(key, num_bytes):
                return {"ref": held.ref.model_dump(), "location": object_store.locate(held.payload)}
            self._puts[name] = connection
            return None

    def end_put(
        self, _: int, name: str, num_rows: int, num_bytes: int, task: tuple[str, str] | None, data: bytes = b""
    ) -> dict[str, Any]:
        """Make a chunk readable: the bytes of this request, or those that a writer's task has written."""
        key = ChunkKey.parse(name)
        if task is None:
            stored = self._store(key, data)
        with self._lock:
            ref = stored if task is None else self._writers.take(name, *task)
            held = self._index.commit(key, num_rows, num_bytes, ref)
            self._puts.pop(name, None)
            self._lock.notify_all()
        return held.model_dump()

    def confirm(self, _: int, names: list[str]) -> None:
        """Wait until these chunks would outlive their writers."""
        self._writers.wait_confirmed(names)

    def abort_put(self, _: int, name: str, task: tuple[str, str]) -> None:
        """Release a put that failed; if a writer's task has taken the chunk, the task has ended or failed."""
        self._release(name)
        self._writers.discard(*task)

    def locations(self, _: int, refs: list[dict[str, Any]]) -> list[Location]:
        """Return where chunks are, in order."""
        with self._lock:
            payloads = self._index.payloads([ChunkRef(**ref) for ref in refs])
        return [object_store.locate(payload) for payload in payloads]  # on every request, as an object may move

    def delete(self, _: int, refs: list[dict[str, Any]]) -> int:
        with self._lock:
            freed = self._index.delete([ChunkRef(**ref) for ref in refs])
            self._lock.notify_all()
            return freed

    def clear(self, _: int, step: int) -> int:
        with self._lock:
            freed = self._index.clear(step)
            self._lock.notify_all()
            return freed

    def save_batch(self, _: int, step: int, batch: str) -> None:
        with self._lock:
            self._index.save_batch(step, batch)

    def load_batch(self, _: int, step: int) -> str | None:
        with self._lock:
            return self._index.load_batch(step)

    def steps(self, _: int) -> list[int]:
        with self._lock:
            return self._index.steps()

    def usage(self, _: int) -> dict[str, Any]:
        with self._lock:
            return self._index.usage().model_dump()

    def _admit(self, key: ChunkKey, num_bytes: int) -> Entry[Payload] | None:
        """Wait for another put of the key, and for capacity; reserve the key, or return its chunk if it is held."""
        deadline = time.monotonic() + self._put_timeout
        self._index.require_lease(key)
        while self._index.is_reserved(key) or self._must_wait(key, num_bytes):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._lock.wait(min(left, self._lease_seconds / 4))
            self._index.require_lease(key)  # waiting counts as work on the step, and a sweep may free capacity
        if held := self._index.find(key):
            return held
        self._index.reserve(key, num_bytes)
        return None

    def _must_wait(self, key: ChunkKey, num_bytes: int) -> bool:
        """Return whether the chunk doesn't fit now, but would once other steps are cleared."""
        index = self._index
        return not (index.find(key) or index.fits(num_bytes)) and index.fits_alone(key.step, num_bytes)

    def _store(self, key: ChunkKey, data: bytes) -> ray.ObjectRef[bytes]:
        try:
            return ray.put(data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise object_store_full_error(key) from error

    def _drop(self, name: str) -> None:
        with self._lock:
            self._index.drop(name)

    def _release(self, name: str) -> None:
        with self._lock:
            self._puts.pop(name, None)
            self._index.release(ChunkKey.parse(name))
            self._lock.notify_all()

    def _release_all(self, connection: int) -> None:
        """Release the puts that a closed connection has left in progress."""
        with self._lock:
            left = [name for name, owner in self._puts.items() if owner == connection]
        for name in left:
            self._release(name)

    def _maintenance_loop(self) -> None:
        """Sweep expired leases and update the metrics periodically."""
        while True:
            with self._lock:
                if self._index.sweep():
                    self._lock.notify_all()
                usage = self._index.usage()
            record_usage(self._run_id, usage)
            time.sleep(min(self._lease_seconds / 2, _MAINTENANCE_SECONDS))


_REQUESTS = (
    "open_lease",
    "begin_put",
    "end_put",
    "confirm",
    "abort_put",
    "locations",
    "delete",
    "clear",
    "save_batch",
    "load_batch",
    "steps",
    "usage",
)
