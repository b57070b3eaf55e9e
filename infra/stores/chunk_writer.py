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
_MAX_REGISTRIES = 16  # that one writer can serve at a time

ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {_GROUP: _MAX_REGISTRIES}}  # for `ray.remote` of a ChunkWriter


class ChunkWriter:
    """A mixin for actors that put large chunks: tasks of the registry, which will own the chunks, wait in it.

    A task's return value belongs to its caller. So a registry calls `write_chunk` ahead of time; the task waits
    in the writer's process for the next chunk, and returns it into the object store of the writer's own node, where it
    outlives the writer. Arrow writes it there straight from the columns' own memory.
    """

    @ray.method(concurrency_group=_GROUP, num_returns=2)
    def write_chunk(self, registry: str, owner: bytes) -> tuple[bytes, None]:
        """Return the next chunk that this process puts into a registry's store, to be owned by `owner`."""
        while (write := _queues[registry].get()) is not None:
            if write.start():
                return write.run(owner), None
        return b"", None


class ChunkWrite:
    """The write of one chunk from this process's columns into its node's object store."""

    def __init__(self, columns: pa.RecordBatch, num_bytes: int) -> None:
        self._columns, self._num_bytes = columns, num_bytes
        self._lock, self._is_started, self._is_cancelled = threading.Lock(), False, False
        self._done = threading.Event()
        self._mapped: pa.Buffer | None = None
        self._error: BaseException | None = None
        self.task_id = ""  # of the task that runs it, hex

    def submit(self, registry: str) -> None:
        """Have the registry's waiting task run it; return when the chunk is in the object store.

        Raises:
            ObjectStoreFullError: The chunk doesn't fit.
        """
        _queues[registry].put(self)
        self._done.wait()
        if self._error:
            raise self._error

    def start(self) -> bool:
        """Mark it as started, unless it was cancelled; return whether it may run."""
        with self._lock:
            self._is_started = not self._is_cancelled
        return self._is_started

    def cancel(self) -> None:
        """Keep any task from starting it; if one has started it, wait until that is done."""
        with self._lock:
            self._is_cancelled = not self._is_started
        if self._is_started:
            self._done.wait()

    def run(self, owner: bytes) -> bytes:
        """Write the chunk as the running task's first return value; return what the task has to return for it."""
        try:
            self.task_id = ray.get_runtime_context().get_task_id() or ""
            returned, self._mapped = write_returned(self._num_bytes, self.write_into, owner)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._done.set()
        return returned

    def write_into(self, target: memoryview) -> int:
        """Encode the columns into `target`; return the bytes written."""
        with pa.FixedSizeBufferWriter(pa.py_buffer(target)) as sink:
            sink.set_memcopy_threads(_COPY_THREADS)
            codec.write(self._columns, sink)
        return self._num_bytes


_queues: defaultdict[str, queue.SimpleQueue[ChunkWrite | None]] = defaultdict(queue.SimpleQueue)  # by registry


def this_writer() -> Any | None:
    """Return the handle of this process's actor if it is a ChunkWriter, else None."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    handle = context.current_actor
    return handle if hasattr(handle, "write_chunk") else None


def stop_serving(registry: str) -> None:
    """End the task of a registry that is gone, which would wait here for a chunk forever."""
    _queues[registry].put(None)
