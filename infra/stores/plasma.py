"""Raw bytes in Ray's object store, written and mapped without a copy of their own.

Ray stores `bytes` as they are, without pickle, but its public API copies them on the way in and on the way out.
This module, and no other, reaches into Ray's core worker; `tests/infra/test_plasma.py` and
`tests/contracts/test_ray.py` guard it against the pinned release.
"""

import queue
import threading
from collections import defaultdict
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError

from rl_core.columns import codec
from schemas.errors import ChunkNotFoundError

Location = tuple[str, str, str]  # an object's id, its owner's address and its state there, hex

_RAW = b"RAW"  # ray._private.ray_constants.OBJECT_METADATA_TYPE_RAW; an error or a pickle is marked otherwise
_COPY_THREADS = 4
_GROUP = "store"
_MAX_REGISTRIES = 16  # that one writer may serve at a time

ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {_GROUP: _MAX_REGISTRIES}}  # for `ray.remote` of a ChunkWriter


def view(ref: ray.ObjectRef[bytes], timeout_seconds: float = 60.0) -> pa.Buffer:
    """Map an object that was stored as `bytes`, read-only; the mapping keeps the object alive.

    Raises:
        ChunkNotFoundError: The object's owner is dead, or it did not arrive in time, or it isn't raw bytes.
    """
    try:
        data, metadata, *_ = _core_worker().get_objects([ref], int(timeout_seconds * 1000))[0]
    except GetTimeoutError as error:
        raise ChunkNotFoundError(
            f"object {ref.hex()} did not arrive from its node within {timeout_seconds:g} s"
        ) from error
    if metadata != _RAW or data is None:
        raise ChunkNotFoundError(
            f"object {ref.hex()} is marked {metadata!r}, expected {_RAW!r}: it is lost, or no column store wrote it"
        )
    return pa.py_buffer(memoryview(data).toreadonly())


def locate(ref: ray.ObjectRef[bytes]) -> Location:
    """An object's place in plain text, for a process that is told it by its owner."""
    _, owner, status = _core_worker().serialize_object_ref(ref)
    return ref.binary().hex(), owner.hex(), status.hex()


def view_at(location: Location, timeout_seconds: float = 60.0) -> pa.Buffer:
    """Map the object at a location; see `view`."""
    data, owner, status = map(bytes.fromhex, location)
    ref: ray.ObjectRef[bytes] = ray.ObjectRef(data)
    _core_worker().deserialize_and_register_object_ref(data, ray.ObjectRef.nil(), owner, status)
    return view(ref, timeout_seconds)


def address() -> bytes:
    """Under which this process owns objects."""
    owner: bytes = _core_worker().get_owner_address(ray.put(b""))
    return owner


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
        """Create the running task's first return value ahead of its return, and return as many empty bytes.

        Ray finds that the object is there, pins it, and leaves the empty bytes, which were never touched, aside.
        """
        try:
            self.task_id = ray.get_runtime_context().get_task_id() or ""
            ref: ray.ObjectRef[bytes] = ray.ObjectRef(bytes.fromhex(self.task_id) + (1).to_bytes(4, "little"))
            _core_worker().put_file_like_object(_RAW, self._num_bytes, self, ref, owner)
            self._mapped = view(ref)  # nobody has pinned it yet; what is mapped is not evicted
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._written.set()
        return bytes(self._num_bytes)

    def readinto(self, target: memoryview) -> int:
        """Write the chunk into `target`, which lies in the object store; Ray asks for it so."""
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


def _core_worker() -> Any:
    return ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
