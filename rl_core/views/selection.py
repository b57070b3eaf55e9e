"""The selection algebra: each function returns a new handle and rewrites its row ranges."""

from collections.abc import Mapping, Sequence

import numpy as np

from rl_core.columns.codec import arrow_type
from rl_core.views.packed import Ints, IntsLike, chunk_bounds, coalesce, expand, integers, pack, unpack
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup
from schemas.errors import ColumnError


def new_batch(
    run_id: str,
    step: int,
    policy_version: int,
    chunks: Sequence[ChunkRef],
    dtypes: Mapping[str, str],
    prompt_lengths: IntsLike,
    response_lengths: IntsLike,
) -> BatchHandle:
    """The batch of all rows of `chunks`, in order; its N rows have these lengths in tokens, [N] each.

    Raises:
        ColumnError: An undeclared column or dtype, a repeated chunk, or not one length per row of the chunks.
    """
    num_rows = _total_rows(chunks)
    for axis, lengths in (("prompt", prompt_lengths), ("response", response_lengths)):
        if len(lengths) != num_rows:
            raise ColumnError(f"there are {len(lengths)} {axis} lengths for chunks of {num_rows} rows")
    return BatchHandle(
        run_id=run_id,
        step=step,
        policy_version=policy_version,
        num_rows=num_rows,
        prompt_lengths=pack(prompt_lengths),
        response_lengths=pack(response_lengths),
        groups=(_new_group(dtypes, chunks, np.arange(num_rows)),),
    )


def select(batch: BatchHandle, rows: IntsLike) -> BatchHandle:
    """The batch's `rows`, in the order asked; a row may be asked for more than once.

    Raises:
        IndexError: A row is negative or not below `batch.num_rows`.
        TypeError: Rows that are not integers; turn a mask into rows with `np.flatnonzero`.
    """
    index = integers(rows)
    outside = index[(index < 0) | (index >= batch.num_rows)]
    if outside.size:
        raise IndexError(f"row {outside[0]} is not in a batch of {batch.num_rows} rows; rows count from 0")
    return batch.replace(
        num_rows=index.size,
        prompt_lengths=pack(unpack(batch.prompt_lengths)[index]),
        response_lengths=pack(unpack(batch.response_lengths)[index]),
        groups=tuple(group.replace(segments=coalesce(expand(group.segments)[index])) for group in batch.groups),
    )


def slice_rows(batch: BatchHandle, start: int, stop: int) -> BatchHandle:
    """Rows start to stop, half-open.

    Raises:
        IndexError: Not 0 <= start <= stop <= `batch.num_rows`.
    """
    if not 0 <= start <= stop <= batch.num_rows:
        raise IndexError(f"rows {start} to {stop} are not a range of a batch of {batch.num_rows} rows")
    return select(batch, np.arange(start, stop))


def permute(batch: BatchHandle, order: IntsLike) -> BatchHandle:
    """All rows in another order: row i of the result is row `order[i]`; `order` has shape [N].

    Raises:
        IndexError: A row is negative or not below `batch.num_rows`.
        ValueError: A row is missing or repeated.
    """
    permuted = select(batch, order)
    times = np.bincount(integers(order), minlength=batch.num_rows)
    if (times != 1).any():
        raise ValueError(
            f"row {np.argmax(times != 1)} occurs {times[np.argmax(times != 1)]} times in a permutation of "
            f"{batch.num_rows} rows; use select to drop or repeat rows"
        )
    return permuted


def split(batch: BatchHandle, counts: IntsLike) -> list[BatchHandle]:
    """Consecutive parts of `counts[i]` rows each.

    Raises:
        ValueError: A negative count, or counts that don't add up to the batch's rows.
    """
    sizes = integers(counts)
    if (sizes < 0).any() or sizes.sum() != batch.num_rows:
        raise ValueError(f"counts {sizes.tolist()} don't split a batch of {batch.num_rows} rows")
    stops = np.cumsum(sizes)
    return [slice_rows(batch, int(stop - size), int(stop)) for stop, size in zip(stops, sizes, strict=True)]


def concat(batches: Sequence[BatchHandle]) -> BatchHandle:
    """The rows of several batches of one step, one after the other; a chunk they share is named once.

    Raises:
        ValueError: No batches, or batches of different runs, steps or policy versions.
        ColumnError: Columns or dtypes differ.
    """
    if not batches:
        raise ValueError("there are no batches to concatenate: an empty batch needs its columns' dtypes")
    first = batches[0]
    for batch in batches[1:]:
        _check_same_kind(first, batch)
    # Columns that share a group in every batch share one in the result.
    together: dict[tuple[int, ...], list[str]] = {}
    for name in first.columns:
        together.setdefault(tuple(_group_of(batch, name) for batch in batches), []).append(name)
    groups = [
        _concat_groups([batch.groups[at] for batch, at in zip(batches, positions, strict=True)], names)
        for positions, names in together.items()
    ]
    return first.replace(
        num_rows=sum(batch.num_rows for batch in batches),
        prompt_lengths=pack(np.concatenate([unpack(batch.prompt_lengths) for batch in batches])),
        response_lengths=pack(np.concatenate([unpack(batch.response_lengths) for batch in batches])),
        groups=tuple(groups),
    )


def with_column(
    batch: BatchHandle, names_dtypes: Mapping[str, str], chunks: Sequence[ChunkRef], rows: IntsLike
) -> BatchHandle:
    """Add columns whose chunks hold the batch's rows in any order.

    Args:
        batch: The batch of N rows that the columns extend.
        names_dtypes: The new columns' dtypes by name.
        chunks: What the producers put; their rows are numbered one chunk after the other.
        rows: Which batch row each of these N rows belongs to.

    Raises:
        ColumnError: A column is there already or undeclared, or the chunks don't hold every row exactly once.
    """
    present = sorted(set(names_dtypes) & set(batch.columns))
    if present:
        raise ColumnError(f"column {present[0]!r} is already in the batch: a column is produced once a step")
    index, num_stored = integers(rows), _total_rows(chunks)
    if index.size != num_stored:
        raise ColumnError(f"there are {index.size} row numbers for chunks of {num_stored} rows")
    outside = index[(index < 0) | (index >= batch.num_rows)]
    if outside.size:
        raise ColumnError(
            f"columns {', '.join(names_dtypes)} name row {outside[0]} of a batch of {batch.num_rows} rows"
        )
    times = np.bincount(index, minlength=batch.num_rows)
    wrong = np.flatnonzero(times != 1)
    if wrong.size:
        raise ColumnError(
            f"columns {', '.join(names_dtypes)} hold row {wrong[0]} {times[wrong[0]]} times, "
            f"expected each of {batch.num_rows} rows once"
        )
    order = np.empty(batch.num_rows, dtype=np.int64)
    order[index] = np.arange(batch.num_rows)
    return batch.replace(groups=(*batch.groups, _new_group(names_dtypes, chunks, order)))


def _total_rows(chunks: Sequence[ChunkRef]) -> int:
    return sum(chunk.num_rows for chunk in chunks)


def _new_group(dtypes: Mapping[str, str], chunks: Sequence[ChunkRef], rows: Ints) -> ColumnGroup:
    for name, dtype in dtypes.items():
        arrow_type(name, dtype)
    if len({chunk.key for chunk in chunks}) != len(chunks):
        raise ColumnError(f"a chunk is named twice: {', '.join(chunk.key for chunk in chunks)}")
    return ColumnGroup(dtypes=dict(dtypes), chunks=tuple(chunks), segments=coalesce(rows))


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
    place = {chunk: at for at, chunk in enumerate(chunks)}
    bounds = chunk_bounds(chunks)
    parts = []
    for group in groups:
        rows, old_bounds = expand(group.segments), chunk_bounds(group.chunks)
        chunk = np.searchsorted(old_bounds, rows, side="right") - 1
        moved = np.array([bounds[place[ref]] for ref in group.chunks], dtype=np.int64) - old_bounds[:-1]
        parts.append(rows + moved[chunk])
    return _new_group({name: groups[0].dtypes[name] for name in names}, chunks, np.concatenate(parts))
