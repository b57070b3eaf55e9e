"""Raw bytes in Ray's object store, written and mapped without an extra copy.

Ray stores `bytes` as they are, without pickle, but its public API copies them on the way in and on the way out.
Only this module calls Ray's core worker directly; `tests/infra/test_object_store.py` and `tests/contracts/test_ray.py`
check it against the pinned release.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError

from schemas.errors import ChunkNotFoundError

Result = TypeVar("Result")
Location = tuple[str, str, str]  # an object's id, its owner's address and its status there, hex

_RAW = b"RAW"  # ray._private.ray_constants.OBJECT_METADATA_TYPE_RAW; errors and pickles have other metadata
_INLINE_BYTES = 2**20  # smaller objects are returned as they are: Ray sends the smallest ones in its reply


def view(ref: ray.ObjectRef[bytes], timeout_seconds: float = 60.0) -> pa.Buffer:
    """Map an object that was stored as `bytes`, read-only; the mapping keeps the object alive.

    Raises:
        ChunkNotFoundError: The object's owner is dead, the object did not arrive in time, or it isn't raw bytes.
    """
    try:
        data, metadata, *_ = _core_worker().get_objects([ref], int(timeout_seconds * 1000))[0]
    except GetTimeoutError as error:
        raise ChunkNotFoundError(
            f"object {ref.hex()} did not arrive from its node within {timeout_seconds:g} s"
        ) from error
    if metadata != _RAW or data is None:
        raise ChunkNotFoundError(
            f"object {ref.hex()} has metadata {metadata!r}, expected {_RAW!r}: it is lost, or no column store wrote it"
        )
    return pa.py_buffer(memoryview(data).toreadonly())


def locate(ref: ray.ObjectRef[bytes]) -> Location:
    """Return an object's location as plain text, which its owner can send to another process."""
    _, owner, status = _core_worker().serialize_object_ref(ref)
    return ref.binary().hex(), owner.hex(), status.hex()


def view_at(location: Location, timeout_seconds: float = 60.0) -> pa.Buffer:
    """Map the object at a location; see `view`."""
    data, owner, status = map(bytes.fromhex, location)
    ref: ray.ObjectRef[bytes] = ray.ObjectRef(data)
    _core_worker().deserialize_and_register_object_ref(data, ray.ObjectRef.nil(), owner, status)
    return view(ref, timeout_seconds)


def address() -> bytes:
    """Return the address under which this process owns objects."""
    owner: bytes = _core_worker().get_owner_address(ray.put(b""))
    return owner


class Returned(tuple[bytes, Any]):
    """A task's two return values, the first from `write_returned`, and the mapping that Ray needs until it has them."""

    mapped: pa.Buffer | None


def return_written(num_bytes: int, write: Callable[[memoryview], Result], owner: bytes) -> tuple[bytes, Result]:
    """Return, from an actor's method of two return values, a buffer written by `write_returned` and a result.

    Args:
        num_bytes: The buffer's size.
        write: Fills the buffer, and returns the result.
        owner: The caller's `address()`.
    """
    results: list[Result] = []
    data, mapped = write_returned(num_bytes, lambda target: results.append(write(target)), owner)
    returned = Returned((data, results[0]))
    returned.mapped = mapped  # Ray drops what the method returns once it has pinned the buffer
    return returned


def write_returned(
    num_bytes: int, write: Callable[[memoryview], object], owner: bytes
) -> tuple[bytes, pa.Buffer | None]:
    """Write the running task's first return value straight into this node's object store, before it returns.

    Args:
        num_bytes: Its size.
        write: Fills the memory that it is passed, whose content is arbitrary.
        owner: The `address()` of the task's caller, which owns its return values.

    Returns:
        The value that the task must return in its place: zero bytes of the same size, which are never touched, as Ray
        finds that the object exists and pins that instead. And the mapped object, to be referenced until then: it isn't
        pinned yet, and a mapped object is not evicted. A small object is returned as it is.

    Raises:
        ObjectStoreFullError: The object doesn't fit.
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
    """The file-like object from which Ray reads an object's bytes."""

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self._write = write
        self.error: BaseException | None = None

    def readinto(self, target: memoryview) -> int:
        """Fill all of `target`, which is in the object store."""
        try:
            self._write(target)
        except BaseException as error:  # noqa: BLE001  # raised once the object is complete: Ray never frees an incomplete one
            self.error = error
        return len(target)


def _core_worker() -> Any:
    return ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
