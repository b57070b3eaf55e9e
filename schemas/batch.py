"""Handles of stored rows: chunks, segments over them, and per-row lengths.

A batch has N rows. Its columns come in groups; a group is what its producers put: chunks in order, whose rows
are concatenated, and the segments of that concatenation which make up the batch's rows, in order.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeInt

from schemas.base import Frozen

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _safe_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a safe name: use letters, digits, '.', '_', '-'; start with a letter or digit"
        )
    return value


SafeName = Annotated[str, AfterValidator(_safe_name)]


class ChunkKey(Frozen):
    """The deterministic name of one chunk: the same producer call always writes the same key."""

    run_id: SafeName
    step: NonNegativeInt
    stage: SafeName
    shard: NonNegativeInt = 0
    attempt: NonNegativeInt = 0

    def __str__(self) -> str:
        return f"{step_prefix(self.run_id, self.step)}{self.stage}/{self.shard}/{self.attempt}"


def step_prefix(run_id: str, step: int) -> str:
    """The prefix that all chunk keys of one step share."""
    return f"{run_id}/{step}/"


class ChunkRef(Frozen):
    """One stored Arrow record batch."""

    key: str
    num_rows: int
    num_bytes: int
    generation: str  # the store's incarnation that holds it; another incarnation never serves it


class PackedInts(Frozen):
    """N non-negative integers, little-endian and base64, in the narrowest dtype; one value when all are equal."""

    size: NonNegativeInt
    dtype: Literal["u1", "u2", "u4", "u8"]
    data: str


class Segments(Frozen):
    """Half-open row ranges [start, start + count), in order; adjacent ranges are always merged."""

    starts: PackedInts
    counts: PackedInts


class ColumnGroup(Frozen):
    """Columns that were put together: their dtypes, their chunks, and which of the chunks' rows the batch has."""

    dtypes: dict[str, str]  # column name -> str(Arrow value type); survives an empty selection
    chunks: tuple[ChunkRef, ...]
    segments: Segments


class BatchHandle(Frozen):
    """N rows of one step, held in the column store. Selecting from it moves no payload (`rl_core.views`)."""

    run_id: SafeName
    step: NonNegativeInt
    policy_version: NonNegativeInt
    num_rows: NonNegativeInt
    prompt_lengths: PackedInts  # N, tokens
    response_lengths: PackedInts  # N, tokens
    groups: tuple[ColumnGroup, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that have been produced, in the order of their groups."""
        return tuple(name for group in self.groups for name in group.dtypes)
