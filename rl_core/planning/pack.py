"""Packing of rows into bins under a hard token budget; a bin is one packed forward.

N rows in a batch, n rows to pack, R ranks. A bin is an ascending array of row indices.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError

Rows = NDArray[np.int64]
Lengths = NDArray[np.int64]


def check_budget(rows: Rows, lengths: Lengths, token_budget: int) -> None:
    """Check that each of the rows fits into a bin of its own.

    Raises:
        PlanError: One row alone is longer than the budget.
    """
    if not len(rows):
        return
    longest = int(rows[lengths[rows].argmax()])
    if (num_tokens := int(lengths[longest])) > token_budget:
        raise PlanError(
            f"row {longest} has {num_tokens} tokens (prompt + response), but packing.token_budget is"
            f" {token_budget}; raise packing.token_budget to at least {num_tokens} or shorten"
            " data.max_prompt_tokens or rollout.max_response_tokens"
        )


def pack(rows: Rows, lengths: Lengths, token_budget: int) -> list[Rows]:
    """Pack rows into few bins: longest first, each into the fullest bin that it fits in (best fit decreasing).

    Args:
        rows: [n] indices of the rows to pack.
        lengths: [N] prompt + response tokens of every row of the batch.
        token_budget: The maximum number of tokens in a bin.

    Returns:
        Bins that together hold every row exactly once; none is empty, none exceeds the budget.

    Raises:
        PlanError: One row alone is longer than the budget.
    """
    check_budget(rows, lengths, token_budget)
    longest_first = _longest_first(rows, lengths)
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for row, num_tokens in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        fit = bisect_left(free, (num_tokens, 0))
        if fit < len(free):
            num_free, index = free.pop(fit)
        else:
            num_free, index = token_budget, len(bins)
            bins.append([])
        bins[index].append(row)
        insort(free, (num_free - num_tokens, index))
    return _ascending(bins)


def pack_ranks(ranks: Sequence[Rows], lengths: Lengths, token_budget: int) -> list[list[Rows]]:
    """Pack every rank's rows into the same number of balanced bins, as few as possible.

    The number is what the tokens of the fullest rank need, if the rows of all ranks fit into that many bins; otherwise
    what `pack` needs for the ranks that don't fit. Rows that can't be packed evenly into that many bins stay packed,
    with some bins split.

    Args:
        ranks: R arrays of row indices.
        lengths: [N] tokens of every row of the batch.
        token_budget: The maximum number of tokens in a bin.

    Returns:
        The same number of bins for each rank, at least one; a rank has empty bins only if it has fewer rows than bins.

    Raises:
        PlanError: One row alone is longer than the budget.
    """
    fewest = max(1, *(-(-int(lengths[rows].sum()) // token_budget) for rows in ranks))
    packed = [pack_evenly(rows, lengths, token_budget, fewest) or pack(rows, lengths, token_budget) for rows in ranks]
    num_bins = max(map(len, packed))
    if num_bins == fewest:
        return packed
    return [
        pack_evenly(rows, lengths, token_budget, num_bins) or split_bins(bins, lengths, num_bins)
        for rows, bins in zip(ranks, packed, strict=True)
    ]


def pack_evenly(rows: Rows, lengths: Lengths, token_budget: int, num_bins: int) -> list[Rows] | None:
    """Pack rows into a given number of bins with about equal tokens: longest first, each into the emptiest bin.

    Even bins keep the ranks in step, whose collectives wait for each other, and have the lowest peak memory.

    Args:
        rows: [n] indices of the rows to pack.
        lengths: [N] tokens of every row of the batch.
        token_budget: The maximum number of tokens in a bin.
        num_bins: At least 1.

    Returns:
        `num_bins` bins, some of them empty only if there are fewer rows; None if a row doesn't fit.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # Among bins of equal tokens, the one with the fewest rows comes first: rows of zero tokens leave no bin empty.
    heap = [(0, 0, index) for index in range(num_bins)]
    longest_first = _longest_first(rows, lengths)
    for row, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        num_tokens, count, index = heap[0]
        if num_tokens + length > token_budget:
            return None
        bins[index].append(row)
        heapq.heapreplace(heap, (num_tokens + length, count + 1, index))
    return _ascending(bins)


def split_bins(bins: Sequence[Rows], lengths: Lengths, num_bins: int) -> list[Rows]:
    """Split bins in two, the fullest first, until there are `num_bins`; if no bin can be split, add empty ones.

    A part has no more tokens than the whole, so the budget still holds; packing again into more bins would not
    guarantee that.

    Args:
        bins: At most `num_bins` bins.
        lengths: [N] tokens of every row of the batch.
        num_bins: The number of bins to return.

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


def _halve(rows: Rows, lengths: Lengths) -> list[Rows]:
    """Split rows into two parts of about equal tokens; none is empty if there are at least two rows."""
    parts = pack_evenly(rows, lengths, int(lengths[rows].sum()), 2)
    assert parts is not None, "the budget holds all rows, so each part has space"
    return parts


def _longest_first(rows: Rows, lengths: Lengths) -> Rows:
    ordered: Rows = rows[np.lexsort((rows, -lengths[rows]))]
    return ordered


def _ascending(bins: Sequence[Sequence[int]]) -> list[Rows]:
    return [np.array(sorted(rows), dtype=np.int64) for rows in bins]
