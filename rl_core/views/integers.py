"""Integers in handles, encoded in as few bytes as their range needs."""

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.batch import EncodedInts
from schemas.packed import PackedInts

AnyInts = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]
IntsLike = npt.NDArray[Any] | Sequence[int]

_DTYPES: tuple[Literal["u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8"], ...] = (
    "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8",
)  # fmt: skip


def encode_ints(ints: IntsLike, base: int = 0) -> EncodedInts:
    """Encode `base` plus each of `ints`, shape [n], in as few bytes as their range needs; in none if all are equal.

    Raises:
        ValueError: A negative or too large value, or another shape.
        TypeError: Values that are not integers (bool included).
    """
    values = _checked(ints)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0:
        raise ValueError(f"can't encode {low}, expected non-negative integers")
    if low == high:
        return EncodedInts(size=values.size, base=base + low if values.size else 0, dtype="u1", data=b"")
    words = np.dtype(narrow_dtype(high - low)).newbyteorder("<")
    data = (values - low if low else values).astype(words, copy=False).tobytes()
    dtype = _DTYPES[((high - low).bit_length() - 1) // 8]
    return EncodedInts(size=values.size, base=base + low, dtype=dtype, data=data)


def decode_ints(encoded: EncodedInts) -> Ints:
    """Decode to int64, shape [encoded.size]."""
    values = offsets(encoded).astype(np.int64)
    values += encoded.base
    return values


def offsets(encoded: EncodedInts) -> AnyInts:
    """Return each integer's offset from `encoded.base`, shape [encoded.size], in a narrow unsigned dtype."""
    if not encoded.data:
        return np.zeros(encoded.size, dtype=np.uint8)
    return np.frombuffer(encoded.data, dtype=f"<u{encoded.word_bytes}")


def total(encoded: EncodedInts) -> int:
    """Sum the encoded integers."""
    return encoded.size * encoded.base + (int(offsets(encoded).sum(dtype=np.int64)) if encoded.data else 0)


def as_int64(values: IntsLike) -> Ints:
    """Convert `values`, shape [n], to int64.

    Raises:
        ValueError: Another shape, or a value that does not fit.
        TypeError: Values that are not integers (bool included).
    """
    return _checked(values).astype(np.int64, copy=False)


def pack_ints(values: Ints) -> PackedInts:
    """Pack `values`, shape [n], from 0 to 2^31 - 1, without an object of Python for each."""
    highest = int(values.max(initial=0))
    dtype = np.dtype(next(dtype for dtype in (np.uint8, np.uint16, np.int32) if highest <= np.iinfo(dtype).max))
    return PackedInts(array(dtype.char, values.astype(dtype).tobytes()))


def narrow_dtype(limit: int) -> type[np.integer[Any]]:
    """Return numpy's narrowest unsigned dtype of up to 32 bits that holds 0 to `limit`, else int64."""
    return next((dtype for dtype in (np.uint8, np.uint16, np.uint32) if limit <= np.iinfo(dtype).max), np.int64)


def take(values: AnyInts, index: AnyInts) -> AnyInts:
    """Return `values[index]`, read-only; the index must be in range, as an invalid one reads foreign memory."""
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
