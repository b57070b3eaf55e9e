"""Operations on the chunks of a handle: column groups over them, and concatenating batches."""

from collections.abc import Mapping, Sequence

import numpy as np

from rl_core.columns.codec import arrow_type
from rl_core.views.integers import Ints, decode_ints, encode_ints
from rl_core.views.segments import chunk_bounds, merge, read_plan
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup, Segments
from schemas.errors import ColumnError


def new_group(dtypes: Mapping[str, str], chunks: Sequence[ChunkRef], segments: Segments) -> ColumnGroup:
    """Create a column group whose rows are `segments` of the concatenated chunks.

    Raises:
        ColumnError: An undeclared column or dtype, or a repeated chunk.
    """
    for name, dtype in dtypes.items():
        arrow_type(name, dtype)
    if len({chunk.key for chunk in chunks}) != len(chunks):
        raise ColumnError(f"a chunk is listed twice: {', '.join(chunk.key for chunk in chunks)}")
    return ColumnGroup(dtypes=dict(dtypes), chunks=tuple(chunks), segments=segments)


def concat(batches: Sequence[BatchHandle]) -> BatchHandle:
    """Concatenate the rows of several batches of one step; a chunk that they share is listed once.

    Raises:
        ValueError: No batches, or batches of different runs, steps or policy versions.
        ColumnError: Columns or dtypes differ.
    """
    if not batches:
        raise ValueError("no batches to concatenate: the columns and dtypes of the result would be unknown")
    first = batches[0]
    for batch in batches[1:]:
        _check_same_kind(first, batch)
    # Columns that share a group in every batch share one in the result.
    grouped: dict[tuple[int, ...], list[str]] = {}
    for name in first.columns:
        grouped.setdefault(tuple(_group_of(batch, name) for batch in batches), []).append(name)
    groups = [
        _concat_groups([batch.groups[at] for batch, at in zip(batches, positions, strict=True)], names)
        for positions, names in grouped.items()
    ]
    return first.replace(
        num_rows=sum(batch.num_rows for batch in batches),
        prompt_lengths=encode_ints(np.concatenate([decode_ints(batch.prompt_lengths) for batch in batches])),
        response_lengths=encode_ints(np.concatenate([decode_ints(batch.response_lengths) for batch in batches])),
        groups=tuple(groups),
    )


def _group_of(batch: BatchHandle, name: str) -> int:
    return next(at for at, group in enumerate(batch.groups) if name in group.dtypes)


def _check_same_kind(first: BatchHandle, other: BatchHandle) -> None:
    kinds = [(batch.run_id, batch.step, batch.policy_version) for batch in (first, other)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"can't concatenate batches of different (run, step, policy version): {kinds[0]}, {kinds[1]}")
    dtypes = [
        {name: dtype for group in batch.groups for name, dtype in group.dtypes.items()} for batch in (first, other)
    ]
    if dtypes[0] != dtypes[1]:
        raise ColumnError(f"can't concatenate batches of different columns: {dtypes[0]} and {dtypes[1]}")


def _concat_groups(groups: Sequence[ColumnGroup], names: Sequence[str]) -> ColumnGroup:
    chunks = list(dict.fromkeys(chunk for group in groups for chunk in group.chunks))
    firsts = dict(zip(chunks, chunk_bounds(chunks).tolist(), strict=False))
    ranges = [
        _moved_ranges(group, np.array([firsts[chunk] for chunk in group.chunks], dtype=np.int64)) for group in groups
    ]
    starts, counts = (np.concatenate(parts) for parts in zip(*ranges, strict=True))
    return new_group({name: groups[0].dtypes[name] for name in names}, chunks, merge(starts, counts))


def _moved_ranges(group: ColumnGroup, firsts: Ints) -> tuple[Ints, Ints]:
    """Return starts and counts of the group's ranges, renumbered so that its chunk i begins at row `firsts[i]`."""
    shifts = firsts - chunk_bounds(group.chunks)[:-1]
    if (shifts == shifts[:1]).all():  # all chunks move by the same distance, so ranges needn't be split by chunk
        return decode_ints(group.segments.starts) + shifts[:1].sum(), decode_ints(group.segments.counts)
    plan = read_plan(group)
    return plan.start + firsts[plan.chunk], plan.stop - plan.start
