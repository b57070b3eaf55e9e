"""Bins of rows under a hard token budget: what one packed forward holds.

N rows in a batch, n rows to pack. A bin is an ascending array of row indices.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError

Rows = NDArray[np.int64]


def pack(rows: Rows, lengths: NDArray[np.int64], token_budget: int) -> list[Rows]:
    """Pack rows into bins, longest first, each into the first bin that has room.

    Args:
        rows: [n] indices of the rows to pack.
        lengths: [N] prompt + response tokens of every row of the batch.
        token_budget: The most tokens that a bin may hold.

    Returns:
        Bins that hold every row exactly once; none is empty, none exceeds the budget.

    Raises:
        PlanError: One row alone is longer than the budget.
    """
    longest_first = rows[np.lexsort((rows, -lengths[rows]))]
    if len(rows) and (num_tokens := int(lengths[longest_first[0]])) > token_budget:
        raise PlanError(
            f"row {longest_first[0]} has {num_tokens} tokens (prompt + response), but packing.token_budget is"
            f" {token_budget}; raise packing.token_budget to at least {num_tokens} or shorten"
            " data.max_prompt_tokens or rollout.max_response_tokens"
        )
    bins: list[list[int]] = []
    room = np.zeros(len(rows), dtype=np.int64)
    for row in longest_first.tolist():
        fits = room[: len(bins)] >= lengths[row]
        if fits.any():
            index = int(fits.argmax())
        else:
            index = len(bins)
            bins.append([])
            room[index] = token_budget
        bins[index].append(row)
        room[index] -= lengths[row]
    return [np.array(sorted(members), dtype=np.int64) for members in bins]


def split_bins(bins: Sequence[Rows], lengths: NDArray[np.int64], num_bins: int) -> list[Rows]:
    """Split bins in two, the fullest first, until there are `num_bins`; then add empty ones.

    A part holds no more tokens than its whole, so the budget still holds; packing again into more bins would
    not promise that.

    Args:
        bins: At most `num_bins` bins.
        lengths: [N] tokens of every row of the batch.
        num_bins: How many bins to return.

    Returns:
        `num_bins` bins with the same rows; some are empty if there are fewer rows than bins.
    """
    assert len(bins) <= num_bins, f"{len(bins)} bins can't become {num_bins} by splitting"
    parts = list(bins)
    while len(parts) < num_bins:
        splittable = [index for index, part in enumerate(parts) if len(part) > 1]
        if not splittable:
            break
        fullest = max(splittable, key=lambda index: int(lengths[parts[index]].sum()))
        parts.extend(_halve(parts.pop(fullest), lengths))
    return parts + [np.empty(0, dtype=np.int64)] * (num_bins - len(parts))


def _halve(rows: Rows, lengths: NDArray[np.int64]) -> tuple[Rows, Rows]:
    """Two non-empty parts of at least two rows: longest first, each row to the part with fewer tokens."""
    parts: tuple[list[int], list[int]] = ([], [])
    num_tokens = [0, 0]
    for row in rows[np.lexsort((rows, -lengths[rows]))].tolist():
        # On equal tokens the shorter part takes the row, so that rows of no tokens can't leave a part empty.
        lighter = min((0, 1), key=lambda part: (num_tokens[part], len(parts[part])))
        parts[lighter].append(row)
        num_tokens[lighter] += int(lengths[row])
    first, second = (np.array(sorted(part), dtype=np.int64) for part in parts)
    return first, second
