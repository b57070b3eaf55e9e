"""Jagged Arrow columns: flat values plus row offsets.

N rows, V values over all rows. A token column is a `pa.LargeListArray` without nulls; a row column is a flat Arrow
array of N values. A token's value may be a vector of C numbers, of a `pa.FixedSizeListArray`. The layout never
depends on the data: rows of equal length are stored in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.errors import ColumnError

if TYPE_CHECKING:
    import torch


Array = npt.NDArray[Any]
BRANCH_COLUMNS = ("turn_tokens", "turn_bridge_tokens", "turn_parents")
PREFIX_COLUMN = "prefix_tokens"  # how many tokens a row begins with as others of its step do
TURN_COLUMNS = ("turn_advantages", "turn_tokens", "turn_bridge_tokens")


def jagged(values: Array | Sequence[Array], lengths: Array | None = None) -> pa.LargeListArray:
    """Build a jagged column of N rows with the dtype of `values`.

    Args:
        values: With `lengths`, all values, flat, shape [V] or [V, C]; without, one 1-D array per row, all of one dtype.
            Flat values are not copied (except bool, into bits), so don't write to them afterwards.
        lengths: The number of values in each row, non-negative integers, shape [N].

    Raises:
        ValueError: Shapes, dtypes or lengths are inconsistent.

    Example:
        >>> column = jagged(np.array([5, 6, 7], dtype=np.uint16), np.array([2, 0, 1]))
        >>> column.to_pylist()
        [[5, 6], [], [7]]
        >>> row_lengths(column).tolist(), flat_values(column[1:]).tolist()
        ([2, 0, 1], [7])
    """
    flat, counts = _from_rows(values, lengths) if not isinstance(values, np.ndarray) else (values, lengths)
    if counts is None:
        raise ValueError("flat values need the lengths of their rows: pass lengths, or a list of 1-D arrays")
    counts = np.asarray(counts)
    if flat.ndim not in (1, 2) or counts.ndim != 1:
        raise ValueError(f"values must be 1-D or 2-D and lengths 1-D, got shapes {flat.shape} and {counts.shape}")
    if counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0):
        raise ValueError(f"lengths must be non-negative integers, got {counts.dtype} {counts[:8].tolist()}")
    bounds = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=bounds[1:])
    if bounds[-1] != len(flat):
        raise ValueError(f"lengths add up to {bounds[-1]} values, but there are {len(flat)}")
    items = pa.array(np.ascontiguousarray(flat).reshape(-1))
    if flat.ndim == 2:
        items = pa.FixedSizeListArray.from_arrays(items, flat.shape[1])
    return pa.LargeListArray.from_arrays(pa.array(bounds), items)


def _from_rows(rows: Sequence[Array], lengths: Array | None) -> tuple[Array, Array]:
    if lengths is not None:
        raise ValueError("lengths go with flat values; the lengths of a list of arrays are already known")
    if not rows:
        raise ValueError("an empty list of rows has no dtype: pass np.empty(0, dtype) and empty lengths")
    dtype = rows[0].dtype
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.dtype != dtype:
            raise ValueError(f"row {number} is {row.dtype}{list(row.shape)}, expected a 1-D array of {dtype}")
    return np.concatenate(rows), np.fromiter((row.size for row in rows), dtype=np.int64, count=len(rows))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest dtype of a token column that holds every id below `vocab_size`: uint16 or int32.

    Raises:
        ValueError: The size is not in 1 to 2**31.
    """
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {2**31}")
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


def is_jagged(column: pa.Array) -> bool:
    """Return whether the column has one list per row."""
    return bool(pa.types.is_large_list(column.type))


def offsets(column: pa.LargeListArray) -> npt.NDArray[np.int64]:
    """Return the start of each row's values in `flat_values(column)`, shape [N + 1], from 0 to V.

    Raises:
        ColumnError: The column is not jagged.
    """
    if not is_jagged(column):
        raise ColumnError(f"a {column.type} column has no row offsets, expected a large_list")
    bounds: npt.NDArray[np.int64] = column.offsets.to_numpy(zero_copy_only=True)
    return bounds - bounds[0] if bounds[0] else bounds


def row_lengths(column: pa.LargeListArray) -> npt.NDArray[np.int64]:
    """Return the number of values in each row, shape [N].

    Raises:
        ColumnError: The column is not jagged.
    """
    return np.diff(offsets(column))


def split_rows(column: pa.LargeListArray) -> list[Array]:
    """Return the values of each row of a jagged column, N views of `flat_values(column)`.

    Raises:
        ColumnError: The column is not jagged, or has nulls.
    """
    return np.split(flat_values(column), offsets(column)[1:-1])


def flat_values(column: pa.Array) -> Array:
    """Return the values of a jagged column, shape [V], or [V, C] of vectors, or of a row column, shape [N].

    The result is a read-only view of the column if Arrow can make one. Bool is unpacked into one byte each, strings
    become an object array, and a float column with nulls is copied, with NaN for null.

    Raises:
        ColumnError: Nulls in a column that is neither float nor string.
    """
    return to_numpy(_values(column))


def to_numpy(values: pa.Array) -> Array:
    """Return an array of values, not jagged, as `flat_values` does.

    Raises:
        ColumnError: Nulls in a column that is neither float nor string.
    """
    if pa.types.is_fixed_size_list(values.type):
        return to_numpy(values.flatten()).reshape(len(values), values.type.list_size)
    if values.null_count and not (pa.types.is_floating(values.type) or pa.types.is_string(values.type)):
        raise ColumnError(f"a {values.type} column has {values.null_count} nulls, expected none")
    flat: Array = values.to_numpy(zero_copy_only=False)
    return flat


def as_tensor(column: pa.Array) -> torch.Tensor:
    """Return `flat_values(column)` as a CPU tensor.

    int32 and float32 tensors are views of the column's memory, which may be shared with other processes: copy them
    before writing. uint16 ids (as int32), bool, and columns with nulls (as NaN) are copied.

    Raises:
        ColumnError: A string column.
    """
    import torch  # takes seconds, and processes that only store columns never need it

    values = _values(column)
    if pa.types.is_string(values.type):
        raise ColumnError("a string column can't be a tensor; read it with flat_values")
    if values.type in (pa.int32(), pa.float32()) and not values.null_count:
        view: torch.Tensor = torch.utils.dlpack.from_dlpack(values)
        return view
    flat = flat_values(column)
    return torch.from_numpy(flat.astype(np.int32) if flat.dtype == np.uint16 else flat.copy())


def _values(column: pa.Array) -> pa.Array:
    if not is_jagged(column):
        return column
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return column.values.slice(first, last - first)


def advantages_of_turns(advantages: pa.Array, sampled: pa.Array, between: pa.Array) -> Array:
    """Return each response token's advantage, [T] float32 of all rows: that of its turn, up to the next one.

    Args:
        advantages: `TURN_COLUMNS[0]`.
        sampled: `TURN_COLUMNS[1]`, the tokens of each turn.
        between: `TURN_COLUMNS[2]`, the tokens that follow them.
    """
    return np.repeat(flat_values(advantages), flat_values(sampled) + flat_values(between))


class Branches(NamedTuple):
    """Where turns of some rows leave the order of their row's tokens, and go on from an earlier one."""

    row: Array  # int64 [B], the row of each, ascending
    turn: Array  # int64 [B], the number of the turn in its row, from 0 on
    start: Array  # int64 [B], where in the response its tokens begin, those between it and the turn before it first
    # int64 [B], the token that it goes on from: 0 is the first one of the response, -1 the last one of the
    # prompt; -(P + 1) with a prompt of P tokens: it begins from nothing.
    parent: Array


def unbranched(sampled: pa.Array, between: pa.Array) -> pa.LargeListArray:
    """Return the parents of the turns of rows without branches, `BRANCH_COLUMNS[2]`, from the other two columns."""
    return jagged(_turn_starts(sampled, between).astype(np.int32) - 1, row_lengths(sampled))


def branches_of(sampled: pa.Array, between: pa.Array, parents: pa.Array) -> Branches:
    """Return where rows branch.

    Args:
        sampled: `BRANCH_COLUMNS[0]`, the tokens of each turn.
        between: `BRANCH_COLUMNS[1]`, the tokens that follow them.
        parents: `BRANCH_COLUMNS[2]`, the token after which a turn goes on, with those between it and the turn before.

    Example:
        >>> of_turns = [[3, 2, 4]], [[1, 2, 0]], [[-1, 2, -1]]
        >>> branches = branches_of(*(jagged(np.array(values[0], np.int32), np.array([3])) for values in of_turns))
        >>> [each.tolist() for each in branches]
        [[0], [2], [6], [-1]]
    """
    lengths = row_lengths(parents)
    row = np.repeat(np.arange(len(lengths)), lengths)
    turn = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    start, parent = _turn_starts(sampled, between), flat_values(parents).astype(np.int64)
    found = np.flatnonzero(parent != start - 1)
    return Branches(row[found], turn[found], start[found], parent[found])


def turns_followed(sampled: Sequence[int], between: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return which turn each of a row's T turns follows: its number, from 1 on; 0: the prompt, or nothing.

    The tokens between two turns are stored behind the one turn, but follow what the other turn follows: a turn that
    goes on from one of them follows that, too.

    Args:
        sampled: The row's `BRANCH_COLUMNS[0]`, T.
        between: Its `BRANCH_COLUMNS[1]`, T.
        parents: Its `BRANCH_COLUMNS[2]`, T.

    Example:
        >>> turns_followed([2, 2, 2, 2], [0, 3, 0, 0], [-1, -1, 1, 6])  # two choices, and two after the first
        [0, 0, 1, 1]
    """
    starts = np.cumsum([0, *map(sum, zip(sampled, between, strict=True))]).tolist()
    followed = list[int]()
    for parent in parents:
        at = bisect_right(starts, parent) - 1  # the turn behind which the parent is stored
        is_between = at >= 0 and parent - starts[at] >= sampled[at]
        followed.append(followed[at + 1] if is_between else at + 1)
    return followed


def pairs_apart(prompts: Array, responses: Array, branches: Branches) -> list[int]:
    """Count the pairs of each row's tokens on different branches (neither attends to the other), [N]; empty: none.

    Args:
        prompts: Integers [N], tokens.
        responses: Integers [N], tokens.
        branches: Those of the rows.

    Example:
        >>> at = (np.array([each]) for each in (0, 1, 2, 0))  # tokens 3 and 4 of the row follow its token 1
        >>> pairs_apart(np.array([1]), np.array([4]), Branches(*at))
        [2]
    """
    if not len(branches.row):
        return []
    apart, lengths = [0] * len(prompts), (prompts + responses).tolist()
    own = zip(branches.row.tolist(), branches.start.tolist(), branches.parent.tolist(), strict=True)
    for row, members in groupby(own, key=lambda branch: branch[0]):
        num_prompt, starts, depths = int(prompts[row]), [0], [0]  # of each part, in the row and on its path
        for _, start, parent in members:
            part = bisect_right(starts, num_prompt + parent) - 1  # -1: it begins from nothing
            depths.append(depths[part] + num_prompt + parent - starts[part] + 1 if part >= 0 else 0)
            starts.append(num_prompt + start)
        stops = [*starts[1:], lengths[row]]
        apart[row] = sum(
            (stop - start) * (start - depth) for start, stop, depth in zip(starts, stops, depths, strict=True)
        )
    return apart


def _turn_starts(sampled: pa.Array, between: pa.Array) -> Array:
    """Return where in its response each turn begins, with the tokens between it and the turn before it: int64."""
    lengths = row_lengths(sampled)
    tokens, follow = (flat_values(column).astype(np.int64) for column in (sampled, between))
    first = np.cumsum(lengths) - lengths  # turn of each row
    is_first = np.zeros(len(tokens), dtype=bool)
    is_first[first[lengths > 0]] = True
    sizes = tokens + np.where(is_first, 0, np.concatenate([[0], follow])[: len(follow)])
    starts = np.cumsum(sizes) - sizes
    within: Array = starts - np.repeat(starts[first[lengths > 0]], lengths[lengths > 0])
    return within
