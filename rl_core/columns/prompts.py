"""Prompts stored once for their samples: a row that repeats the prompt of the row above holds nothing of it.

N rows, of which those of one prompt follow each other. `ColumnSpec.is_of_prompt` names the columns. In those of a row
that repeats a prompt, tokens and texts are empty, so that `prompt_ids`, which never is otherwise, tells these rows. A
batch handle has the prompts' columns as a group of their own, whose segments repeat the rows that hold them.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rl_core.columns.gather import Ints
from rl_core.columns.jagged import is_jagged, row_lengths, to_numpy
from schemas.catalog import column_spec

MIN_COMMON = 0.1  # of a step's tokens: with less in common, rows are computed apart


def find_prefixes(prompts: Sequence[Ints], num_tokens: int) -> tuple[Ints, Ints] | None:
    """Find what prompts of different rows begin with in common, as a system prompt: with as few tokens left as can be.

    Rows sorted by their tokens are divided into runs, of which each has its longest common beginning once.

    Args:
        prompts: N prompts, of at least one token each.
        num_tokens: Of the rows, responses included.

    Returns:
        [N] numbers, equal for rows that begin with the same tokens, and [N] how many tokens these are, at least 1; None
        if rows have less in common than `MIN_COMMON` of their tokens.

    Example:
        >>> numbers, lengths = find_prefixes([np.array([5, 6, 7]), np.array([8]), np.array([5, 6, 9, 9])], 9)
        >>> numbers.tolist(), lengths.tolist()
        ([0, 1, 0], [2, 1, 2])
    """
    keys = [np.ascontiguousarray(prompt, dtype=">u4").tobytes() for prompt in prompts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = [_num_common(prompts[above], prompts[below]) for above, below in itertools.pairwise(order)]
    saved = np.zeros(len(order) + 1, dtype=np.int64)  # by the first rows of the order, at most
    starts = np.zeros(len(order) + 1, dtype=np.int64)  # of the last run of them
    shared = np.zeros(len(order), dtype=np.int64)  # what each row has in common with all those up to the last one
    for stop, row in enumerate(order, start=1):
        if stop > 1:
            np.minimum(shared[: stop - 1], common[stop - 2], out=shared[: stop - 1])
        shared[stop - 1] = len(prompts[row])
        found = saved[:stop] + shared[:stop] * np.arange(stop - 1, -1, -1)
        starts[stop] = stop - 1 - found[::-1].argmax()  # the shortest run that saves as much
        saved[stop] = found[starts[stop]]
    if saved[-1] < MIN_COMMON * num_tokens:
        return None
    lengths, stop = np.empty(len(order), dtype=np.int64), len(order)
    while stop:
        run = order[starts[stop] : stop]
        lengths[run] = min([len(prompts[run[0]]), *common[starts[stop] : stop - 1]])
        stop = starts[stop]
    return number_prefixes(prompts, lengths), lengths


def number_prefixes(prompts: Sequence[Ints], lengths: Ints) -> Ints:
    """Number rows by the first tokens of their prompts, so many of each: [N], from 0."""
    numbers: dict[bytes, int] = {}
    firsts = (prompt[:length].tobytes() for prompt, length in zip(prompts, lengths.tolist(), strict=True))
    return np.array([numbers.setdefault(first, len(numbers)) for first in firsts], dtype=np.int64)


def _num_common(first: Ints, second: Ints) -> int:
    """Return how many tokens two prompts begin with in common."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if differ.size else size


def share_prompts(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Empty the columns of prompts in rows whose values of all of them are those of the row above.

    Example:
        >>> from rl_core.columns.jagged import jagged
        >>> ids = jagged(np.array([5, 6, 5, 6, 7], dtype=np.uint16), np.array([2, 2, 1]))
        >>> shared = share_prompts(pa.record_batch({"prompt_ids": ids}))
        >>> shared["prompt_ids"].to_pylist(), rows_of_prompts(shared["prompt_ids"]).tolist()
        ([[5, 6], [], [7]], [0, 0, 2])
        >>> repeat_prompts(shared)["prompt_ids"].equals(ids)
        True
    """
    names = _of_prompts(columns)
    if not columns.num_rows or not row_lengths(columns["prompt_ids"]).all():
        return columns
    repeats = np.arange(columns.num_rows) > 0
    for name in names:
        if repeats.any():  # else there is nothing to share: the other columns needn't be compared
            repeats &= _repeats(columns[name])
    if not repeats.any():
        return columns
    kept, empty = pa.array(~repeats), pa.scalar("")
    for name in names:
        column = columns[name]
        values = _without(column, kept) if is_jagged(column) else pc.if_else(kept, column, empty)
        columns = columns.set_column(columns.schema.get_field_index(name), name, values)
    return columns


def rows_of_prompts(prompt_ids: pa.LargeListArray) -> Ints:
    """Return the row that holds each row's prompt, [N], in stored rows."""
    rows = np.arange(len(prompt_ids))
    rows[row_lengths(prompt_ids) == 0] = 0
    return np.maximum.accumulate(rows)


def repeat_prompts(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Give each row of a stored chunk its prompt: undo `share_prompts`."""
    rows = rows_of_prompts(columns["prompt_ids"])
    if (rows == np.arange(rows.size)).all():
        return columns
    for name in _of_prompts(columns):
        at = columns.schema.get_field_index(name)
        columns = columns.set_column(at, name, columns[name].take(pa.array(rows)))
    return columns


def _of_prompts(columns: pa.RecordBatch) -> list[str]:
    return [name for name in columns.schema.names if column_spec(name).is_of_prompt]


def _repeats(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return whether each row of a column of lists or strings has the bytes of the row above, [N]."""
    if is_jagged(column):
        bounds, values = column.offsets.to_numpy(), to_numpy(column.values)
    else:
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
        values = np.frombuffer(data or b"", np.uint8)
    item = values.dtype.itemsize * int(np.prod(values.shape[1:]))
    low = int(bounds[0])
    held = values[low : bounds[-1]].tobytes()
    edges = ((bounds.astype(np.int64) - low) * item).tolist()
    rows = [held[start:stop] for start, stop in itertools.pairwise(edges)]
    return np.array([False, *map(bytes.__eq__, rows[1:], rows)])


def _without(column: pa.LargeListArray, kept: pa.BooleanArray) -> pa.LargeListArray:
    lengths = np.where(kept, row_lengths(column), 0)
    values = column.filter(kept)
    return pa.LargeListArray.from_arrays(pa.array(np.cumsum([0, *lengths])), values.flatten())
