"""The registry actor of one run: it owns the chunks that lie in Ray's object store, and keeps their books.

Ray finds it, keeps it alive and names what it owns; requests come over a channel of its own, which is faster.
"""

import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from infra.ray import object_store
from infra.ray.object_store import Location
from infra.stores.channel import Endpoint, Server
from infra.stores.chunk_index import ChunkIndex, Entry
from infra.stores.prometheus import show_usage
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import CapacityError, StoreError

Payload = ray.ObjectRef[bytes]
Task = list[ray.ObjectRef[Any]]  # what a writer's task will return: the chunk, and that it has ended
_MAINTENANCE_SECONDS = 2.0
_MAX_ENDING = 64  # writers' tasks whose ends are awaited at once: one that hangs holds up no other

logger = logging.getLogger(__name__)


class RayStoreRegistry:
    """See `ColumnStore` for what its requests promise.

    A chunk is put in two requests: `begin_put` reserves its key and its bytes, `end_put` makes it readable. What a
    client began and never ended is released when its connection ends, as it does when its process dies.

    Args:
        run_id: The run whose columns it holds.
        capacity_bytes: The limit of all held chunks together.
        put_timeout_seconds: How long a put waits for other steps' bytes to be cleared.
        lease_seconds: How long a lease lasts that nobody renews.
        incarnation: The name of this incarnation; None makes a new one.
    """

    def __init__(
        self,
        run_id: str,
        capacity_bytes: int,
        put_timeout_seconds: float,
        lease_seconds: float,
        incarnation: str | None,
    ) -> None:
        self._run_id, self._put_timeout, self._lease_seconds = run_id, put_timeout_seconds, lease_seconds
        self._index = ChunkIndex[Payload](capacity_bytes, lease_seconds, incarnation)
        self._lock = threading.Condition()  # of the books and what is begun; notified when they change
        self._begun: dict[str, int] = {}  # key -> the connection that writes it
        self._id, self._address = uuid.uuid4().hex, object_store.address()
        self._writers: dict[str, Any] = {}
        self._waiting: dict[str, Task] = {}  # by writer: the one that will return its next chunk
        self._unconfirmed: set[str | None] = set()  # keys whose writers' tasks have not ended
        handlers = {name: getattr(self, name) for name in _REQUESTS}
        self._server = Server(ray.util.get_node_ip_address(), handlers, self._release_all)
        self._pool = ThreadPoolExecutor(_MAX_ENDING)
        threading.Thread(target=self._maintenance_loop, daemon=True).start()

    def endpoint(self) -> tuple[Endpoint, str, str]:
        """Where requests go, this registry's own name, and its incarnation. An actor call, as `add_writer`."""
        return self._server.endpoint, self._id, self._index.incarnation

    def add_writer(self, actor_id: str, writer: Any) -> None:
        """Make an actor known that will put large chunks; `writer` is its handle."""
        with self._lock:
            is_new = actor_id not in self._writers
            self._writers[actor_id] = writer
        if is_new:
            self._await_chunk(actor_id)

    def open_lease(self, _: int, step: int) -> None:
        with self._lock:
            self._index.open_lease(step)

    def begin_put(self, connection: int, name: str, num_bytes: int) -> dict[str, Any] | None:
        """Reserve a key and room for it; returns the chunk if it is held already, for its second writer to compare."""
        key = ChunkKey.parse(name)
        with self._lock:
            if held := self._admit(key, num_bytes):
                return {"ref": held.ref.model_dump(), "location": object_store.locate(held.payload)}
            self._begun[name] = connection
            return None

    def end_put(
        self, _: int, name: str, num_rows: int, num_bytes: int, task: tuple[str, str] | None, data: bytes = b""
    ) -> dict[str, Any]:
        """Hold what was begun, and make it readable: bytes that came along, or what a writer's task has written."""
        key = ChunkKey.parse(name)
        if task is None:
            stored = self._store(key, data)
        with self._lock:
            ref = stored if task is None else self._take_written(name, *task)
            held = self._index.commit(key, num_rows, num_bytes, ref)
            self._begun.pop(name, None)
            self._lock.notify_all()
        return held.model_dump()

    def confirm(self, _: int, names: list[str]) -> None:
        """Wait until the writers of these chunks may die."""
        with self._lock:
            self._lock.wait_for(lambda: not self._unconfirmed & set(names))

    def abort_put(self, _: int, name: str, task: tuple[str, str]) -> None:
        """Give up what was begun; the writer's task, if one took the chunk, has ended or failed."""
        self._release(name)
        writer, task_id = task
        with self._lock:
            waiting = self._waiting.get(writer)
            if waiting and waiting[0].task_id().hex() == task_id:
                self._pool.submit(self._await_writer, None, writer, self._waiting.pop(writer)[1])

    def locations(self, _: int, refs: list[dict[str, Any]]) -> list[Location]:
        """Where chunks are, in order."""
        with self._lock:
            payloads = self._index.payloads([ChunkRef(**ref) for ref in refs])
        return [object_store.locate(payload) for payload in payloads]  # told now, as where it lies may change

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
        """Wait for another writer of the key, and for room; reserve it, unless the key is held by then."""
        deadline = time.monotonic() + self._put_timeout
        self._index.require_lease(key)
        while self._index.is_reserved(key) or self._must_wait(key, num_bytes):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._lock.wait(min(left, self._lease_seconds / 4))
            self._index.require_lease(key)  # who waits still works on its step; and a sweep may make room
        if held := self._index.find(key):
            return held
        self._index.reserve(key, num_bytes)
        return None

    def _must_wait(self, key: ChunkKey, num_bytes: int) -> bool:
        """Whether there is no room, but would be once other steps were cleared."""
        books = self._index
        return not (books.find(key) or books.has_room(num_bytes)) and books.may_get_room(key.step, num_bytes)

    def _store(self, key: ChunkKey, data: bytes) -> ray.ObjectRef[bytes]:
        try:
            return ray.put(data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise no_room(key) from error

    def _take_written(self, name: str, writer: str, task_id: str) -> ray.ObjectRef[bytes]:
        """What the writer's task returns. It is in the object store; its task ends, and is followed by the next."""
        with self._lock:
            chunk, ended = self._waiting.pop(writer)
            self._pool.submit(self._await_writer, name, writer, ended)
            if chunk.task_id().hex() != task_id:
                raise StoreError(f"chunk {name} was written by task {task_id}, expected {chunk.task_id().hex()}")
            self._unconfirmed.add(name)
        return chunk

    def _await_chunk(self, writer: str) -> None:
        """Call the writer for its next chunk, ahead of time."""
        with self._lock:
            self._waiting[writer] = self._writers[writer].write_chunk.remote(self._id, self._address)

    def _release(self, name: str) -> None:
        with self._lock:
            self._begun.pop(name, None)
            self._index.release(ChunkKey.parse(name))
            self._lock.notify_all()

    def _await_writer(self, name: str | None, writer: str, ended: ray.ObjectRef[None]) -> None:
        """Wait for a writer's task: a chunk whose writer died before is lost, and its key is free again."""
        try:
            ray.get(ended)
        except RayError as error:
            logger.warning("chunk %s is lost, as its writer failed: %s", name, error)
            with self._lock:
                self._index.drop(name)
        with self._lock:
            self._unconfirmed.discard(name)
            self._lock.notify_all()
        self._await_chunk(writer)

    def _release_all(self, connection: int) -> None:
        with self._lock:
            left = [name for name, writer in self._begun.items() if writer == connection]
        for name in left:
            self._release(name)

    def _maintenance_loop(self) -> None:
        """Sweep, and show the gauges."""
        while True:
            with self._lock:
                if self._index.sweep():
                    self._lock.notify_all()
                usage = self._index.usage()
            show_usage(self._run_id, usage)
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


def no_room(key: ChunkKey) -> CapacityError:
    """The error of a chunk for which Ray's object store has no room."""
    return CapacityError(
        f"Ray's object store has no room for chunk {key}: lower store.capacity_bytes, or give Ray more memory"
    )
