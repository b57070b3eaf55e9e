"""Per-row numbers of a report, packed: a few bytes each, instead of a Python object, in memory, in pickles and in JSON.

They are sequences of Python's numbers, and arrays to numpy, without a copy: `np.asarray(values)`. N rows.
"""

from abc import abstractmethod
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from operator import eq, ne
from typing import Any, ClassVar, Self, TypeVar, overload

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Number = TypeVar("Number", int, float | None)

_NAN = float("nan")
_DTYPES = {"B": "|u1", "H": "<u2", "i": "<i4", "f": "<f4", "d": "<f8"}  # numpy's, by type code of `array`


class Packed(Sequence[Number]):
    """N numbers, of the narrowest type that holds them; equal to any sequence of the same ones.

    Args:
        values: The numbers; a string is what JSON has: a type code of `array` and the numbers' bytes in base64.

    Raises:
        ValueError: They can't be packed.
    """

    __slots__ = ("_array",)
    typecodes: ClassVar[str]  # from the narrowest to the widest

    def __init__(self, values: "Iterable[Number] | array[Any] | str" = ()) -> None:
        try:
            self._array: array[Any] = self._pack(values)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"not a sequence of numbers that can be packed: {error}") from None

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """Return the numbers of all parts."""
        arrays = [part._array for part in parts]
        typecode = max((packed.typecode for packed in arrays), key=cls.typecodes.index, default=cls.typecodes[0])
        whole = array(typecode)
        whole.frombytes(
            b"".join(packed if packed.typecode == typecode else cls._widen(packed, typecode) for packed in arrays)
        )
        return cls(whole)

    @staticmethod
    def _widen(packed: "array[Any]", typecode: str) -> "array[Any] | bytearray":
        """Return the numbers as those of a wider type."""
        return array(typecode, packed)

    def _pack(self, values: "Iterable[Number] | array[Any] | str") -> "array[Any]":
        if isinstance(values, type(self)):
            return values._array
        if isinstance(values, str):
            if values[:1] not in tuple(self.typecodes):
                raise ValueError(f"{values[:20]!r} doesn't begin with one of the type codes {self.typecodes}")
            packed = array(values[0])
            packed.frombytes(a2b_base64(values[1:], strict_mode=True))
            return packed
        return values if isinstance(values, array) else self._narrowest(values)

    @abstractmethod
    def _narrowest(self, values: Iterable[Any]) -> "array[Any]":
        """Pack Python's numbers."""

    @abstractmethod
    def __iter__(self) -> Iterator[Number]: ...

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Number | Self:
        if isinstance(index, slice):
            return type(self)(self._array[index])
        return next(iter(type(self)(array(self._array.typecode, (self._array[index],)))))

    def __eq__(self, other: object) -> bool:
        return len(self) == len(other) and all(map(eq, self, other)) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[Self], tuple["array[Any]"]]:
        return type(self), (self._array,)

    @property
    def __array_interface__(self) -> dict[str, object]:
        data = memoryview(self._array).toreadonly()
        return {"shape": (len(self),), "typestr": _DTYPES[self._array.typecode], "data": data, "version": 3}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        to_text = core_schema.plain_serializer_function_ser_schema(_to_text, when_used="json")
        return core_schema.no_info_plain_validator_function(cls, serialization=to_text)


def _to_text(packed: Packed[Any]) -> str:
    return packed._array.typecode + b2a_base64(packed._array, newline=False).decode("ascii")


class PackedInts(Packed[int]):
    """N integers from -2^31 to 2^31 - 1."""

    __slots__ = ()
    typecodes = "BHi"

    def _narrowest(self, values: Iterable[int]) -> "array[int]":
        packed = array("i", values)
        low, high = min(packed, default=0), max(packed, default=0)
        return packed if low < 0 or high >= 2**16 else array("B" if high < 2**8 else "H", packed)

    @staticmethod
    def _widen(packed: "array[Any]", typecode: str) -> bytearray:
        # The narrower types are unsigned, and the bytes little-endian: only zeros are added, many numbers at a time.
        data, old, new = packed.tobytes(), packed.itemsize, array(typecode).itemsize
        items = bytearray(len(packed) * new)
        for at in range(old):
            items[at::new] = data[at::old]
        return items

    def __iter__(self) -> Iterator[int]:
        return iter(self._array)


class PackedFloats(Packed[float | None]):
    """N floats, each of which may be None; numpy sees NaN instead."""

    __slots__ = ()
    typecodes = "fd"

    def _narrowest(self, values: Iterable[float | None]) -> "array[float]":
        packed = array("d", (_NAN if value is None else value for value in values))
        narrow = array("f", packed)
        return narrow if all(map(_is_same, packed, narrow)) else packed

    def __iter__(self) -> Iterator[float | None]:
        return (None if value != value else value for value in self._array)

    def count(self, value: float | None) -> int:
        """Return how many of the numbers equal `value`; to count None takes no search."""
        return sum(map(ne, self._array, self._array)) if value is None else self._array.count(value)

    @property
    def present(self) -> list[float]:
        """The numbers that are not None, in order."""
        return [value for value in self._array if value == value]


def _is_same(value: float, other: float) -> bool:
    return value == other or value != value
