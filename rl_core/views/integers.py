"""Integers inside handles, encoded in as few bytes as their range needs."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.batch import EncodedInts

AnyInts = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]
IntsLike = npt.NDArray[Any] | Sequence[int]

_DTYPES: tuple[Literal["u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8"], ...] = (
    "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8",
)  # fmt: skip


def encode_ints(ints: IntsLike, base: int = 0) -> EncodedInts:
    """Pack `base` plus each of `ints`, shape [n], in as many bytes each as their range needs; none if all are equal.

    Raises:
        ValueError: A negative or too large value, or another shape.
        TypeError: Values that are not integers (bool included).
    """
    values = _checked(ints)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0:
        raise ValueError(f"can't pack {low}: packed integers are non-negative")
    if low == high:
        return EncodedInts(size=values.size, base=base + low if values.size else 0, dtype="u1", data=b"")
    words = np.dtype(narrow_dtype(high - low)).newbyteorder("<")
    data = (values - low if low else values).astype(words, copy=False).tobytes()
    dtype = _DTYPES[((high - low).bit_length() - 1) // 8]
    return EncodedInts(size=values.size, base=base + low, dtype=dtype, data=data)


def decode_ints(packed: EncodedInts) -> Ints:
    """The integers that were packed, int64, shape [packed.size]."""
    values = offsets(packed).astype(np.int64)
    values += packed.base
    return values


def offsets(packed: EncodedInts) -> AnyInts:
    """What each packed integer adds to `packed.base`, shape [packed.size], in a narrow unsigned dtype."""
    if not packed.data:
        return np.zeros(packed.size, dtype=np.uint8)
    return np.frombuffer(packed.data, dtype=f"<u{packed.word_bytes}")


def total(packed: EncodedInts) -> int:
    """The sum of the integers that were packed."""
    return packed.size * packed.base + (int(offsets(packed).sum(dtype=np.int64)) if packed.data else 0)


def integers(values: IntsLike) -> Ints:
    """`values`, shape [n], as int64.

    Raises:
        ValueError: Another shape, or a value that does not fit.
        TypeError: Values that are not integers (bool included).
    """
    return _checked(values).astype(np.int64, copy=False)


def narrow_dtype(limit: int) -> type[np.integer[Any]]:
    """The narrowest of numpy's unsigned dtypes, or int64, that holds 0 to `limit`."""
    return next((dtype for dtype in (np.uint8, np.uint16, np.uint32) if limit <= np.iinfo(dtype).max), np.int64)


def take(values: AnyInts, index: AnyInts) -> AnyInts:
    """`values[index]`, read-only, for an index that was checked: a wrong one reads memory that is not the array's."""
    taken: AnyInts = pc.take(pa.array(values), pa.array(index), boundscheck=False).to_numpy()
    return taken


def _checked(values: IntsLike) -> AnyInts:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"expected a 1-D array of integers, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)  # numpy gives an empty list float64
    if array.dtype.kind not in "iu":
        raise TypeError(f"expected integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{array.max()} does not fit in int64")
    return array
