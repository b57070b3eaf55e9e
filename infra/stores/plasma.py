"""Raw bytes in Ray's object store, written and mapped without a copy of their own.

Ray stores `bytes` as they are, without pickle, but its public API copies them on the way in and on the way out.
This module, and no other, reaches into Ray's core worker; `tests/infra/test_plasma.py` and
`tests/contracts/test_ray.py` guard it against the pinned release.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError

from rl_core.columns import codec
from schemas.errors import ChunkNotFoundError

Result = TypeVar("Result")
Location = tuple[str, str, str]  # an object's id, its owner's address and its state there, hex

_RAW = b"RAW"  # ray._private.ray_constants.OBJECT_METADATA_TYPE_RAW; an error or a pickle is marked otherwise
_COPY_THREADS = 4
_WHOLE_BYTES = 2**20  # smaller ones are returned as they are: Ray sends the smallest within its reply, not by the store
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


class Returned(tuple[bytes, Any]):
    """Two return values of a task, the first of them from `write_returned`, and what must live until Ray has them."""

    mapped: pa.Buffer | None


def return_written(num_bytes: int, write: Callable[[memoryview], Result], owner: bytes) -> tuple[bytes, Result]:
    """What an actor's method of two return values returns: a buffer written as `write_returned` does, and an answer.

    Args:
        num_bytes: The buffer's size.
        write: Fills it, and returns the answer.
        owner: The caller's `address()`.
    """
    answers: list[Result] = []
    data, mapped = write_returned(num_bytes, lambda target: answers.append(write(target)), owner)
    returned = Returned((data, answers[0]))
    returned.mapped = mapped  # Ray lets go of what the method returns once it has pinned the buffer
    return returned


def write_returned(
    num_bytes: int, write: Callable[[memoryview], object], owner: bytes
) -> tuple[bytes, pa.Buffer | None]:
    """Write the running task's first return value straight into this node's object store, ahead of its return.

    Args:
        num_bytes: Its size.
        write: Fills the memory that it is given; what that held before is arbitrary.
        owner: The `address()` of the task's caller, to whom its return values belong.

    Returns:
        What the task has to return for it: as many empty bytes, which are never touched; Ray finds that the object
        is there, pins it, and leaves them aside. And the mapped object, to be held until then: nobody has pinned it
        yet, and what is mapped is not evicted. A small object is returned as it is.

    Raises:
        ObjectStoreFullError: There is no room for it.
    """
    if num_bytes < _WHOLE_BYTES:
        data = bytearray(num_bytes)
        write(memoryview(data))
        return bytes(data), None
    task_id = ray.get_runtime_context().get_task_id() or ""
    ref: ray.ObjectRef[bytes] = ray.ObjectRef(bytes.fromhex(task_id) + (1).to_bytes(4, "little"))
    source = _Source(write)
    _core_worker().put_file_like_object(_RAW, num_bytes, source, ref, owner)
    if source.error:
        raise source.error
    return bytes(num_bytes), view(ref)


class _Source:
    """What Ray takes for a file that it reads an object from."""

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self._write = write
        self.error: BaseException | None = None

    def readinto(self, target: memoryview) -> int:
        """Fill all of `target`, which lies in the object store."""
        try:
            self._write(target)
        except BaseException as error:  # noqa: BLE001  # raised once the object is complete: Ray never frees another
            self.error = error
        return len(target)


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


def _core_worker() -> Any:
    return ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
