"""Selection of rows: each function returns a new handle with rewritten row ranges."""

from collections.abc import Mapping, Sequence

import numpy as np

from rl_core.views.chunks import new_group
from rl_core.views.integers import Ints, IntsLike, as_int64, encode_ints, narrow_dtype, offsets, take, total
from rl_core.views.segments import coalesce, merge, pick, row_numbers
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup, Segments
from schemas.catalog import column_spec
from schemas.errors import ColumnError


def new_batch(
    run_id: str,
    step: int,
    policy_version: int,
    chunks: Sequence[ChunkRef],
    dtypes: Mapping[str, str],
    prompt_lengths: IntsLike,
    response_lengths: IntsLike,
    prompt_rows: IntsLike | None = None,
) -> BatchHandle:
    """Create the batch of all N rows of `chunks`, in order; lengths are in tokens, [N] each.

    Args:
        run_id: The run.
        step: The step.
        policy_version: The version that sampled the rows.
        chunks: The rows' chunks, which are concatenated.
        dtypes: The dtypes of their columns by name.
        prompt_lengths: Those of the rows' prompts.
        response_lengths: Those of their responses.
        prompt_rows: Of each row, the row with its prompt, [N]; see `rl_core.columns.prompts`. None: its own.

    Raises:
        ColumnError: An undeclared column or dtype, a repeated chunk, or a number of lengths other than N.
        IndexError: There is no such row with a prompt.
    """
    num_rows = _total_rows(chunks)
    for axis, lengths in (("prompt", prompt_lengths), ("response", response_lengths)):
        if len(lengths) != num_rows:
            raise ColumnError(f"got {len(lengths)} {axis} lengths for chunks of {num_rows} rows, expected one per row")
    whole = new_group(dtypes, chunks, merge(np.array([0]), np.array([num_rows])))
    batch = BatchHandle(
        run_id=run_id,
        step=step,
        policy_version=policy_version,
        num_rows=num_rows,
        prompt_lengths=encode_ints(prompt_lengths),
        response_lengths=encode_ints(response_lengths),
        groups=(whole,),
    )
    if prompt_rows is None or np.array_equal(prompt_rows, np.arange(num_rows)):
        return batch
    if len(prompt_rows) != num_rows:
        raise ColumnError(f"got {len(prompt_rows)} rows with prompts for a batch of {num_rows}, expected one per row")
    of_prompts, others = (
        {name: dtype for name, dtype in dtypes.items() if column_spec(name).is_of_prompt == wanted}
        for wanted in (True, False)
    )
    segments = pick(whole.segments, [_row_index(batch, prompt_rows)])[0]
    shared = ColumnGroup(dtypes=of_prompts, chunks=whole.chunks, segments=segments)
    return batch.replace(groups=(shared, whole.replace(dtypes=others)))


def number_prompts(batch: BatchHandle) -> Ints:
    """Return the number of each row's prompt, [N]: equal for rows whose prompt is stored once.

    Raises:
        ColumnError: The batch has no prompts.
    """
    group = next((group for group in batch.groups if "prompt_ids" in group.dtypes), None)
    if group is None:
        raise ColumnError(f"step {batch.step} of run {batch.run_id} has no column prompt_ids")
    numbers: Ints = row_numbers(group.segments)
    return numbers


def select(batch: BatchHandle, rows: IntsLike) -> BatchHandle:
    """Select rows in the given order; a row may be repeated.

    Raises:
        IndexError: A row is negative or not below `batch.num_rows`.
        TypeError: Rows that are not integers, such as a mask, of which `np.flatnonzero` makes some.
    """
    return _views(batch, [_row_index(batch, rows)])[0]


def split(batch: BatchHandle, counts: IntsLike) -> list[BatchHandle]:
    """Split into consecutive parts of `counts[i]` rows each.

    Raises:
        ValueError: A negative count, or counts that don't add up to the batch's rows.
    """
    sizes = as_int64(counts)
    if (sizes < 0).any() or sizes.sum() != batch.num_rows:
        raise ValueError(
            f"counts {sizes.tolist()} don't split a batch of {batch.num_rows} rows; they must add up to its rows"
        )
    return _views(batch, np.split(np.arange(batch.num_rows), np.cumsum(sizes)[:-1]) if sizes.size else [])


def with_column(
    batch: BatchHandle, names_dtypes: Mapping[str, str], chunks: Sequence[ChunkRef], rows: IntsLike
) -> BatchHandle:
    """Add columns whose chunks hold the batch's rows in any order.

    Args:
        batch: The batch of N rows to extend.
        names_dtypes: The new columns' dtypes by name.
        chunks: The chunks with the new columns; their rows are numbered over the concatenation of the chunks.
        rows: For each of these N rows, the row of the batch that it belongs to.

    Raises:
        ColumnError: A column is already in the batch or undeclared, or the chunks don't hold every row exactly once.
    """
    index, num_stored = as_int64(rows), _total_rows(chunks)
    if index.size != num_stored:
        raise ColumnError(f"got {index.size} row numbers for chunks of {num_stored} rows, expected one per row")
    outside = index[(index < 0) | (index >= batch.num_rows)]
    if outside.size:
        raise ColumnError(
            f"columns {', '.join(names_dtypes)} have row {outside[0]}, which is not in a batch of {batch.num_rows} rows"
        )
    order = np.full(batch.num_rows, -1, dtype=np.int64)
    order[index] = np.arange(num_stored)
    if num_stored != batch.num_rows or (order < 0).any():
        row, times = _miscounted(index, batch.num_rows)
        raise ColumnError(
            f"columns {', '.join(names_dtypes)} hold row {row} {times} times, "
            f"expected each of {batch.num_rows} rows once"
        )
    return with_groups(batch, [new_group(names_dtypes, chunks, coalesce(order))])


def with_groups(batch: BatchHandle, groups: Sequence[ColumnGroup]) -> BatchHandle:
    """Add column groups of the same rows, which `with_column` made of this batch or of one with fewer columns.

    Raises:
        ColumnError: A column is already in the batch.
    """
    present = set(batch.columns)
    for name in (name for group in groups for name in group.dtypes):
        if name in present:
            raise ColumnError(f"column {name!r} is already in the batch: a column is produced once per step")
        present.add(name)
    return batch.replace(groups=(*batch.groups, *groups))


def _views(batch: BatchHandle, indices: Sequence[Ints]) -> list[BatchHandle]:
    """Create one view per index, which must be in range; shared arrays and equal segments are decoded only once."""
    distinct: list[Segments] = []
    for group in batch.groups:
        if group.segments not in distinct:
            distinct.append(group.segments)
    places = [distinct.index(group.segments) for group in batch.groups]
    prompts, responses = batch.prompt_lengths, batch.response_lengths
    sizes = {prompts.size, responses.size, *(total(segments.counts) for segments in distinct)}
    if sizes - {batch.num_rows}:
        raise ValueError(
            f"the batch handle is inconsistent: it has {batch.num_rows} rows, but lengths and segments of"
            f" {sorted(sizes)} rows"
        )
    narrow = [index.astype(narrow_dtype(batch.num_rows)) for index in indices]
    picked = [pick(segments, narrow) for segments in distinct]
    prompt_offsets, response_offsets = offsets(prompts), offsets(responses)
    return [
        batch.replace(
            num_rows=index.size,
            prompt_lengths=encode_ints(take(prompt_offsets, index), prompts.base),
            response_lengths=encode_ints(take(response_offsets, index), responses.base),
            groups=tuple(
                group.replace(segments=picked[place][at]) for group, place in zip(batch.groups, places, strict=True)
            ),
        )
        for at, index in enumerate(narrow)
    ]


def _row_index(batch: BatchHandle, rows: IntsLike) -> Ints:
    index = as_int64(rows)
    if index.size and index.view(np.uint64).max() >= batch.num_rows:  # a negative row looks like a very large one
        outside = index[(index < 0) | (index >= batch.num_rows)]
        raise IndexError(f"row {outside[0]} is not in a batch of {batch.num_rows} rows; rows count from 0")
    return index


def _miscounted(index: Ints, num_rows: int) -> tuple[int, int]:
    """Return the first row that is not in `index` exactly once, and how often it occurs."""
    times = np.bincount(index, minlength=num_rows)
    row = int(np.argmax(times != 1))
    return row, int(times[row])


def _total_rows(chunks: Sequence[ChunkRef]) -> int:
    return sum(chunk.num_rows for chunk in chunks)
