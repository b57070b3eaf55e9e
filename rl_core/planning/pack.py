"""Bins of rows under a hard token budget: what one packed forward holds.

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
    """See that each of the rows fits into a bin of its own.

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
    """Pack rows into few bins: longest first, each into the fullest bin that has room (best fit decreasing).

    Args:
        rows: [n] indices of the rows to pack.
        lengths: [N] prompt + response tokens of every row of the batch.
        token_budget: The most tokens that a bin may hold.

    Returns:
        Bins that hold every row exactly once; none is empty, none exceeds the budget.

    Raises:
        PlanError: One row alone is longer than the budget.
    """
    check_budget(rows, lengths, token_budget)
    longest_first = _longest_first(rows, lengths)
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    for row, num_tokens in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        fit = bisect_left(rooms, (num_tokens, 0))
        if fit < len(rooms):
            room, index = rooms.pop(fit)
        else:
            room, index = token_budget, len(bins)
            bins.append([])
        bins[index].append(row)
        insort(rooms, (room - num_tokens, index))
    return _ascending(bins)


def pack_ranks(ranks: Sequence[Rows], lengths: Lengths, token_budget: int) -> list[list[Rows]]:
    """Pack every rank's rows into the same number of bins: even ones, and as few as possible.

    It is as many as the tokens of the fullest rank need, where the rows of all ranks fit into so few; else as many as
    `pack` needs for those that don't. Rows that can't be spread over so many evenly stay packed, their bins split.

    Args:
        ranks: R arrays of row indices.
        lengths: [N] tokens of every row of the batch.
        token_budget: The most tokens that a bin may hold.

    Returns:
        For each rank equally many bins, at least one; a rank has empty ones only where it has fewer rows than bins.

    Raises:
        PlanError: One row alone is longer than the budget.
    """
    fewest = max(1, *(-(-int(lengths[rows].sum()) // token_budget) for rows in ranks))
    packed = [spread(rows, lengths, token_budget, fewest) or pack(rows, lengths, token_budget) for rows in ranks]
    num_bins = max(map(len, packed))
    if num_bins == fewest:
        return packed
    return [
        spread(rows, lengths, token_budget, num_bins) or split_bins(bins, lengths, num_bins)
        for rows, bins in zip(ranks, packed, strict=True)
    ]


def spread(rows: Rows, lengths: Lengths, token_budget: int, num_bins: int) -> list[Rows] | None:
    """Spread rows over bins of about as many tokens: longest first, each into the emptiest bin.

    Even bins line up with those of other ranks, whose collectives wait for each other, and have the lowest peak.

    Args:
        rows: [n] indices of the rows to pack.
        lengths: [N] tokens of every row of the batch.
        token_budget: The most tokens that a bin may hold.
        num_bins: At least 1.

    Returns:
        `num_bins` bins, some of them empty only if there are fewer rows; None if a row finds no room.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # On equal tokens the bin of fewer rows is first, so that rows of no tokens can't leave one empty.
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


def _halve(rows: Rows, lengths: Lengths) -> list[Rows]:
    """Two parts of about as many tokens; none is empty if there are two rows."""
    parts = spread(rows, lengths, int(lengths[rows].sum()), 2)
    assert parts is not None, "each part has room for the whole"
    return parts


def _longest_first(rows: Rows, lengths: Lengths) -> Rows:
    ordered: Rows = rows[np.lexsort((rows, -lengths[rows]))]
    return ordered


def _ascending(bins: Sequence[Sequence[int]]) -> list[Rows]:
    return [np.array(sorted(rows), dtype=np.int64) for rows in bins]
