"""The registry's side of chunk writing: the tasks that wait in writers' processes for their next chunks."""

import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from infra.ray import object_store
from schemas.errors import StoreError

Task = list[ray.ObjectRef[Any]]  # the future return values of a writer's task: the chunk, and None when it has ended
_MAX_ENDING = 64  # writers' tasks whose ends are awaited at once: one that hangs delays no other

logger = logging.getLogger(__name__)


class WriterTasks:
    """One task per writer, called ahead of time; see `ChunkWriter.write_chunk`.

    Args:
        lock: The registry's lock; notified when chunks become confirmed.
        on_lost: Called with a chunk's key if its writer died before the chunk was safe.
    """

    def __init__(self, lock: threading.Condition, on_lost: Callable[[str], None]) -> None:
        self._lock, self._on_lost = lock, on_lost
        self.registry_id = uuid.uuid4().hex
        self._address = object_store.address()
        self._writers: dict[str, Any] = {}  # actor handles by actor id
        self._waiting: dict[str, Task] = {}  # by actor id: the task that will return the writer's next chunk
        self._unconfirmed: set[str] = set()  # keys of chunks whose writers' tasks have not ended
        self._pool = ThreadPoolExecutor(_MAX_ENDING)

    def add_writer(self, actor_id: str, writer: Any) -> None:
        """Register an actor that will put large chunks; `writer` is its handle."""
        with self._lock:
            is_new = actor_id not in self._writers
            self._writers[actor_id] = writer
        if is_new:
            self._request_chunk(actor_id)

    def take(self, name: str, actor_id: str, task_id: str) -> ray.ObjectRef[bytes]:
        """Return the chunk that the writer's task has written; it is in the object store already.

        Raises:
            StoreError: Another task has written it.
        """
        with self._lock:
            chunk, ended = self._waiting.pop(actor_id)
            self._pool.submit(self._await_end, name, actor_id, ended)
            if chunk.task_id().hex() != task_id:
                raise StoreError(f"chunk {name} was written by task {task_id}, expected {chunk.task_id().hex()}")
            self._unconfirmed.add(name)
        return chunk

    def discard(self, actor_id: str, task_id: str) -> None:
        """Drop what the writer's task has written or failed to write, if this task is the one that was waiting."""
        with self._lock:
            waiting = self._waiting.get(actor_id)
            if waiting and waiting[0].task_id().hex() == task_id:
                self._pool.submit(self._await_end, None, actor_id, self._waiting.pop(actor_id)[1])

    def wait_confirmed(self, names: list[str]) -> None:
        """Wait until the chunks would outlive their writers."""
        with self._lock:
            self._lock.wait_for(lambda: not self._unconfirmed & set(names))

    def _request_chunk(self, actor_id: str) -> None:
        """Call the writer for its next chunk, ahead of time."""
        with self._lock:
            self._waiting[actor_id] = self._writers[actor_id].write_chunk.remote(self.registry_id, self._address)

    def _await_end(self, name: str | None, actor_id: str, ended: ray.ObjectRef[None]) -> None:
        """Wait until a writer's task has ended, then call the next one. A chunk whose writer died before is lost."""
        try:
            ray.get(ended)
        except RayError as error:
            logger.warning("chunk %s is lost, as its writer failed: %s", name, error)
            if name is not None:
                self._on_lost(name)
        with self._lock:
            if name is not None:
                self._unconfirmed.discard(name)
            self._lock.notify_all()
        self._request_chunk(actor_id)
