"""Writing large chunks into Ray's object store from the process that produced them."""

import queue
import threading
from collections import defaultdict
from typing import Any

import pyarrow as pa
import ray

from infra.ray.object_store import write_returned
from rl_core.columns import codec

_COPY_THREADS = 4
_GROUP = "store"
_MAX_REGISTRIES = 16  # that one writer may serve at a time

ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {_GROUP: _MAX_REGISTRIES}}  # for `ray.remote` of a ChunkWriter


class ChunkWriter:
    """A mixin of actors that put large chunks: a registry waits in it for what it will own.

    A task's return value belongs to its caller. So a registry calls `write_chunk` ahead of time; the task waits
    within the writer for the next chunk, and returns it into the object store of the writer's own node, where it
    outlives the writer. Arrow writes it there straight from the columns' own memory.
    """

    @ray.method(concurrency_group=_GROUP, num_returns=2)
    def write_chunk(self, registry: str, owner: bytes) -> tuple[bytes, None]:
        """Return the next chunk that this process offers to a registry, to be owned by `owner`."""
        while (offer := _offers[registry].get()) is not None:
            if offer.claim():
                return offer.write(owner), None
        return b"", None


class Offer:
    """A chunk on its way from this process's columns into its node's object store."""

    def __init__(self, columns: pa.RecordBatch, num_bytes: int) -> None:
        self._columns, self._num_bytes = columns, num_bytes
        self._lock, self._is_claimed, self._is_withdrawn = threading.Lock(), False, False
        self._written = threading.Event()
        self._mapped: pa.Buffer | None = None
        self._error: BaseException | None = None
        self.task_id = ""  # of the task that took it, hex

    def hand_over(self, registry: str) -> None:
        """Let the registry's waiting task write the chunk; returns when it is in the object store.

        Raises:
            ObjectStoreFullError: There is no room for it.
        """
        _offers[registry].put(self)
        self._written.wait()
        if self._error:
            raise self._error

    def claim(self) -> bool:
        """Begin to write it, unless it was withdrawn."""
        with self._lock:
            self._is_claimed = not self._is_withdrawn
        return self._is_claimed

    def withdraw(self) -> None:
        """Let no task take it any more; one that has taken it comes to its end first."""
        with self._lock:
            self._is_withdrawn = not self._is_claimed
        if self._is_claimed:
            self._written.wait()

    def write(self, owner: bytes) -> bytes:
        """Let the running task's first return value be the chunk; returns what the task has to return for it."""
        try:
            self.task_id = ray.get_runtime_context().get_task_id() or ""
            returned, self._mapped = write_returned(self._num_bytes, self.readinto, owner)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._written.set()
        return returned

    def readinto(self, target: memoryview) -> int:
        """Write the chunk into `target`, as into the memory that Ray gives."""
        with pa.FixedSizeBufferWriter(pa.py_buffer(target)) as sink:
            sink.set_memcopy_threads(_COPY_THREADS)
            codec.write(self._columns, sink)
        return self._num_bytes


_offers: defaultdict[str, queue.SimpleQueue[Offer | None]] = defaultdict(queue.SimpleQueue)  # by registry


def this_writer() -> Any | None:
    """The handle of the actor that this process is, if it is a ChunkWriter."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    handle = context.current_actor
    return handle if hasattr(handle, "write_chunk") else None


def leave(registry: str) -> None:
    """End the task of a registry that is gone, which waits here for a chunk."""
    _offers[registry].put(None)
