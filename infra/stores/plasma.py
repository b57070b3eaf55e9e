"""Raw bytes in Ray's object store, mapped without a copy.

Ray stores `bytes` as they are, without pickle, but `ray.get` copies them into a Python object. The public API
has no way to map them, so this module, and no other, reaches into Ray's core worker; a test guards it against
the pinned release.
"""

from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError

from schemas.errors import ChunkNotFoundError

_RAW = b"RAW"  # ray._private.ray_constants.OBJECT_METADATA_TYPE_RAW; an error or a pickle is marked otherwise


def view(ref: ray.ObjectRef[bytes], timeout_seconds: float = 60.0) -> pa.Buffer:
    """Map an object that was put as `bytes`, read-only; the mapping keeps the object alive.

    Raises:
        ChunkNotFoundError: The object's owner is dead, or it did not arrive in time, or it isn't raw bytes.
    """
    core_worker: Any = ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
    try:
        data, metadata, *_ = core_worker.get_objects([ref], int(timeout_seconds * 1000))[0]
    except GetTimeoutError as error:
        raise ChunkNotFoundError(
            f"object {ref.hex()} did not arrive from its node within {timeout_seconds:g} s"
        ) from error
    if metadata != _RAW or data is None:
        raise ChunkNotFoundError(
            f"object {ref.hex()} is marked {metadata!r}, expected {_RAW!r}: it is lost, or no column store wrote it"
        )
    return pa.py_buffer(memoryview(data).toreadonly())
