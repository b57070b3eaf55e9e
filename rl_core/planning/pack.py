"""Packing of rows into bins under a hard token budget; a bin is one packed forward.

N rows in a batch, n rows to pack, R ranks. A bin is an ascending array of row indices.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.greedy import fill_emptiest, fill_emptiest_each, fill_fullest_each, sort_by
from schemas.errors import PlanError

Rows = NDArray[np.int64]
Lengths = NDArray[np.int64]
Counts = NDArray[np.int64]


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
    ordered, num_rows = _longest_first([rows], lengths)
    bins = fill_fullest_each(lengths[ordered], num_rows, token_budget)
    return np.split(sort_by(bins, ordered), np.cumsum(np.bincount(bins))[:-1]) if len(rows) else []


def pack_ranks(ranks: Sequence[Rows], lengths: Lengths, token_budget: int) -> tuple[Rows, Counts]:
    """Pack every rank's rows into the same number of balanced bins, as few as possible.

    Even bins keep the ranks in step, whose collectives wait for each other, and have the lowest peak memory. Their
    number is what the tokens of the fullest rank need, if the rows of all ranks fit into that many bins; otherwise what
    `pack` needs for the ranks that don't fit. Rows that can't be packed evenly into that many bins stay packed, with
    some bins split.

    Args:
        ranks: R arrays of row indices.
        lengths: [N] tokens of every row of the batch.
        token_budget: The maximum number of tokens in a bin, which no row exceeds.

    Returns:
        The rows of all ranks, [n], rank by rank and bin by bin, ascending in each bin; and the number of rows of each
        bin, [R, B]. B is at least 1; a rank has empty bins only if it has fewer rows than bins.
    """
    rows, num_rows = _longest_first(ranks, lengths)
    sizes, rank = lengths[rows], np.repeat(np.arange(len(ranks)), num_rows)
    num_tokens = int(np.bincount(rank, weights=sizes, minlength=1).max())
    fewest = max(1, -(-num_tokens // token_budget))
    bins, fits = _fill_evenly(sizes, num_rows, token_budget, fewest)
    num_bins = np.full(len(ranks), fewest)
    if not fits.all():
        of_others, counts = ~fits[rank], num_rows[~fits]  # each of these ranks has rows
        tight = fill_fullest_each(sizes[of_others], counts, token_budget)
        bins[of_others], num_bins[~fits] = tight, np.maximum.reduceat(tight, np.cumsum(counts) - counts) + 1
    if (most := int(num_bins.max())) > fewest:
        even, fits = _fill_evenly(sizes, num_rows, token_budget, most)
        bins, num_bins = np.where(fits[rank], even, bins), np.where(fits, most, num_bins)
    for uneven in np.flatnonzero(num_bins < most).tolist():
        own = rank == uneven
        parts = [np.flatnonzero(bins[own] == number) for number in range(num_bins[uneven])]
        bins[own] = _number_bins(split_bins(parts, sizes[own], most))
    place = rank * most + bins
    return sort_by(place, rows), np.bincount(place, minlength=len(ranks) * most).reshape(-1, most)


def _fill_evenly(sizes: Lengths, num_rows: Counts, token_budget: int, num_bins: int) -> tuple[Rows, NDArray[np.bool_]]:
    """Put each row of `sizes` [n] into the emptiest of its rank's `num_bins`, longest first.

    The rows are given rank by rank, `num_rows` [R] of each, by descending size. Returns the bin of each row, [n], from
    0 in every rank; and whether no bin of the rank exceeds the budget, [R].
    """
    bins = fill_emptiest_each(sizes, num_rows, num_bins)
    place = np.repeat(np.arange(len(num_rows)) * num_bins, num_rows) + bins
    num_tokens = np.bincount(place, weights=sizes, minlength=len(num_rows) * num_bins)
    return bins, num_tokens.reshape(-1, num_bins).max(axis=1) <= token_budget


def _longest_first(ranks: Sequence[Rows], lengths: Lengths) -> tuple[Rows, Counts]:
    """Sort each rank's rows by descending length, in order if equal; return all rows [n], and the ranks' numbers."""
    rows, num_rows = np.concatenate(ranks), np.array([len(rows) for rows in ranks])
    longest = int(lengths[rows].max(initial=0))
    rank = np.repeat(np.arange(len(ranks)), num_rows)
    return sort_by(rank * (longest + 1) + longest - lengths[rows], rows), num_rows


def _number_bins(bins: Sequence[Rows]) -> Rows:
    """Return the number of each row's bin, [n]; together the bins hold the rows 0 .. n - 1."""
    numbers = np.repeat(np.arange(len(bins)), [len(rows) for rows in bins])
    return numbers[np.argsort(np.concatenate(bins))]


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
    ordered, _ = _longest_first([rows], lengths)
    bins = fill_emptiest(lengths[ordered], 2)
    return [np.sort(ordered[bins == number]) for number in (0, 1)]
