"""Raw bytes in Ray's object store, written and mapped without an extra copy.

Ray stores `bytes` as they are, without pickle, but its public API copies them on the way in and on the way out.
This module, and no other, calls Ray's core worker directly; `tests/infra/test_object_store.py` and
`tests/contracts/test_ray.py` guard it against the pinned release.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError

from schemas.errors import ChunkNotFoundError

Result = TypeVar("Result")
Location = tuple[str, str, str]  # an object's id, its owner's address and its state there, hex

_RAW = b"RAW"  # ray._private.ray_constants.OBJECT_METADATA_TYPE_RAW; an error or a pickle is marked otherwise
_INLINE_BYTES = 2**20  # smaller objects are returned as they are: Ray sends the smallest inside its reply


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
    if num_bytes < _INLINE_BYTES:
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


def _core_worker() -> Any:
    return ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
