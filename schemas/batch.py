"""Handles of stored rows: chunks, segments over them, and per-row lengths; the store's usage and traffic.

A batch has N rows. Its columns come in groups. A group has an ordered list of chunks, whose rows are concatenated, and
the segments of that concatenation that make up the batch's rows, in order.
"""

import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from schemas.base import Frozen
from schemas.errors import InvalidKeyError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_KEY = re.compile(rf"{_NAME.pattern}/{_NUMBER}/{_NAME.pattern}/{_NUMBER}/{_NUMBER}")


def _safe_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a safe name: use letters, digits, '.', '_', '-'; start with a letter or digit"
        )
    return value


SafeName = Annotated[str, AfterValidator(_safe_name)]


class ChunkKey(Frozen):
    """The deterministic name of a chunk: the same producer call always writes the same key.

    Example:
        >>> key = ChunkKey(run_id="demo", step=7, stage="rollout", shard=2)
        >>> str(key)
        'demo/7/rollout/2/0'
        >>> ChunkKey.parse("demo/7/rollout/2/0") == key
        True
    """

    run_id: SafeName
    step: NonNegativeInt
    stage: SafeName
    shard: NonNegativeInt = 0
    attempt: NonNegativeInt = 0

    def __str__(self) -> str:
        return f"{self.run_id}/{self.step}/{self.stage}/{self.shard}/{self.attempt}"

    @classmethod
    def parse(cls, key: str) -> Self:
        """Parse the output of `str`.

        Raises:
            InvalidKeyError: The string is not a chunk key.
        """
        if not _KEY.fullmatch(key):
            raise InvalidKeyError(f"{key!r} is not a chunk key, expected run/step/stage/shard/attempt")
        run_id, step, stage, shard, attempt = key.split("/")
        return cls(run_id=run_id, step=int(step), stage=stage, shard=int(shard), attempt=int(attempt))


class ChunkRef(Frozen):
    """One stored Arrow record batch."""

    key: str
    num_rows: int
    num_bytes: int
    incarnation: str  # of the store that holds it; a store of another incarnation never serves it


class EncodedInts(Frozen):
    """N non-negative integers: their minimum, `base`, and their offsets from it as little-endian unsigned integers.

    An offset takes `item_bytes` in JSON, as base64, and `word_bytes` in memory, where arithmetic needs whole words.
    """

    size: NonNegativeInt
    base: int = Field(ge=0, lt=2**63)
    dtype: Literal["u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8"]
    data: bytes = Field(strict=True)  # empty if all integers are equal

    @property
    def item_bytes(self) -> int:
        """The size of the largest offset in bytes."""
        return int(self.dtype[1:])

    @property
    def word_bytes(self) -> int:
        """The bytes of each offset in `data`: `item_bytes` rounded up to a power of two."""
        return _word_bytes(self.item_bytes)

    @field_serializer("data")
    def _to_text(self, data: bytes) -> str:
        return b2a_base64(_resize_items(data, self.word_bytes, self.item_bytes), newline=False).decode("ascii")

    @field_validator("data", mode="before")
    @classmethod
    def _to_words(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str | bytes) or not {"size", "dtype"} <= info.data.keys():
            return value
        size, item_bytes = info.data["size"], int(info.data["dtype"][1:])
        word_bytes = _word_bytes(item_bytes)
        data, width = (_from_base64(value), item_bytes) if isinstance(value, str) else (value, word_bytes)
        if len(data) not in (0, size * width):
            raise ValueError(
                f"{len(data)} bytes don't hold {size} integers of {width} bytes; expected {size * width} bytes, or "
                "none if all integers are equal"
            )
        return _resize_items(data, width, word_bytes)


def _from_base64(text: str) -> bytes:
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"encoded integers are not base64: {error}") from error


def _word_bytes(item_bytes: int) -> int:
    return 1 << (item_bytes - 1).bit_length()


def _resize_items(data: bytes, old: int, new: int) -> bytes:
    """Convert little-endian integers from `old` to `new` bytes each, by adding zero bytes or dropping high bytes."""
    if old == new:
        return data
    items = bytearray(len(data) // old * new)
    for at in range(min(old, new)):
        items[at::new] = data[at::old]
    return bytes(items)


class Segments(Frozen):
    """Half-open row ranges [start, start + count), in order, none empty.

    Adjacent ranges are merged. If fewer than one row in 64 is followed by its neighbor, as in a shuffled batch, every
    row is a range of its own instead, because equal counts take no space.
    """

    starts: EncodedInts
    counts: EncodedInts

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.starts.size != self.counts.size:
            raise ValueError(
                f"row ranges have {self.starts.size} starts and {self.counts.size} counts; expected one each"
            )
        return self


class ColumnGroup(Frozen):
    """Columns that were stored together: their dtypes, their chunks, and the rows of the chunks that the batch has."""

    dtypes: dict[str, str]  # column name -> str(Arrow value type); kept by an empty selection
    chunks: tuple[ChunkRef, ...]
    segments: Segments


class BatchHandle(Frozen):
    """N rows of one step in the column store. Selecting rows moves no data (`rl_core.views`)."""

    run_id: SafeName
    step: NonNegativeInt
    policy_version: NonNegativeInt
    num_rows: NonNegativeInt
    prompt_lengths: EncodedInts  # N, tokens
    response_lengths: EncodedInts  # N, tokens
    groups: tuple[ColumnGroup, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns produced so far, in the order of their groups."""
        return tuple(name for group in self.groups for name in group.dtypes)

    @property
    def chunks(self) -> tuple[ChunkRef, ...]:
        """All chunks of all column groups, each once."""
        return tuple(dict.fromkeys(chunk for group in self.groups for chunk in group.chunks))


class StoreUsage(Frozen):
    """What the column store holds of open steps, as its index counts it over all clients."""

    model_config = ConfigDict(extra="ignore")  # reports of earlier versions have fields that are gone

    num_chunks: NonNegativeInt
    num_rows: NonNegativeInt
    num_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    capacity_bytes: NonNegativeInt
    open_steps: tuple[int, ...] = ()  # in order


class StoreTraffic(Frozen):
    """One process's puts into the column store and reads from it, over some period."""

    num_puts: NonNegativeInt = 0
    put_bytes: NonNegativeInt = 0
    put_seconds: float = 0.0
    num_reads: NonNegativeInt = 0
    read_bytes: NonNegativeInt = 0  # of the returned columns, whether mapped or copied
    read_seconds: float = 0.0

    @classmethod
    def total(cls, parts: "Iterable[StoreTraffic]") -> "StoreTraffic":
        """Add the traffic of several processes or periods."""
        columns = zip(*((value for _, value in part) for part in parts), strict=True)
        return cls(**dict(zip(cls.model_fields, map(sum, columns), strict=False)))

    def __add__(self, other: "StoreTraffic") -> "StoreTraffic":
        theirs = dict(other)
        return StoreTraffic(**{name: value + theirs[name] for name, value in self})
