"""The items of a plan: rows that go into one micro-batch together, as they share the prompt of their group.

N rows in a batch, n of them to plan, m items, R ranks. In a micro-batch the prompt of a group is computed once: a
further row of the group adds only its response, whose attention is over prompt and response.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.balance import Costs, balance, imbalance, rank_costs, row_costs
from rl_core.planning.greedy import fill_emptiest_each, fill_fullest_each, sort_by
from rl_core.planning.pack import Counts, Lengths, Rows

SPLIT_IMBALANCE = 0.01  # of the ranks; above it, groups are split for balance, though each part computes the prompt
MAX_PARTS = 8  # of a group that is split for balance


@dataclass(frozen=True, eq=False)
class RowSizes:
    """The tokens of a batch's rows, and what each costs alone.

    Attributes:
        prompts: [N] tokens.
        responses: [N] tokens.
        groups: [N] from 0; rows of the same group share their prompt. None: no rows share one.
        lengths: [N] prompt + response tokens.
        costs: [N] see `row_costs`.
    """

    prompts: Lengths
    responses: Lengths
    groups: Rows | None
    lengths: Lengths
    costs: Costs

    @classmethod
    def of(cls, prompts: Lengths, responses: Lengths, groups: Rows | None = None) -> "RowSizes":
        """Return the sizes of rows; those of a group whose prompts are of unequal lengths share them by length."""
        if groups is not None:
            _, group = np.unique(groups, return_inverse=True)
            _, groups = np.unique(group * (int(prompts.max(initial=0)) + 1) + prompts, return_inverse=True)
        lengths = prompts + responses
        return cls(prompts, responses, groups, lengths, row_costs(lengths))

    def in_bins(self, rows: Rows, bins: Rows) -> tuple[Lengths, Costs]:
        """Return what each row adds to its bin, in which a prompt counts for the first row that has it.

        Args:
            rows: [n] rows, ascending in each bin.
            bins: [n] the bin of each.

        Returns:
            Tokens and cost, [n] each.
        """
        lengths, costs = self.lengths[rows], self.costs[rows]
        if self.groups is None:
            return lengths, costs
        again = np.ones(len(rows), dtype=np.bool_)
        again[_first_of_each(bins * (int(self.groups.max(initial=0)) + 1) + self.groups[rows])] = False
        shared = self.prompts[rows] * again
        return lengths - shared, costs - row_costs(shared)


@dataclass(frozen=True, eq=False)
class Items:
    """Rows by item.

    Attributes:
        rows: [n] rows, ascending.
        of_rows: [n] the item of each; items are numbered by their first rows.
        lengths: [m] tokens.
        costs: [m] see `row_costs`.
    """

    rows: Rows
    of_rows: Rows
    lengths: Lengths
    costs: Costs

    @classmethod
    def of(cls, sizes: RowSizes, rows: Rows, labels: Rows) -> "Items":
        """Make an item of the rows that have the same label, of [n]."""
        _, first, item = np.unique(labels, return_index=True, return_inverse=True)
        number = np.empty_like(first)
        number[np.argsort(first)] = np.arange(len(first))
        of_rows = number[item]
        lengths, costs = (np.bincount(of_rows, weights=added) for added in sizes.in_bins(rows, of_rows))
        return cls(rows, of_rows, lengths.astype(np.int64), costs.astype(np.float64))

    def expand(self, items: Rows, num_items: Counts) -> tuple[Rows, Counts]:
        """Replace the items of bins by their rows.

        Args:
            items: [m] items, bin by bin.
            num_items: [B] of each bin.

        Returns:
            The rows, [n], bin by bin and ascending in each; and the number of rows of each bin, [B].
        """
        place = np.empty(len(items), dtype=np.int64)
        place[items] = np.repeat(np.arange(len(num_items)), num_items)
        bins = place[self.of_rows]
        return sort_by(bins, self.rows), np.bincount(bins, minlength=len(num_items))


def balance_items(sizes: RowSizes, rows: Rows, num_ranks: int, token_budget: int) -> tuple[Items, list[Rows]]:
    """Make items of rows, and assign them to ranks at balanced cost.

    A group is one item, or as few as the budget allows. If that leaves ranks unbalanced, those that were assigned last
    and don't fill all ranks evenly are split further: into that many parts with which the costliest rank costs least.

    Args:
        sizes: Of all rows of the batch.
        rows: [n] the rows, ascending; none is longer than the budget.
        num_ranks: R.
        token_budget: The maximum number of tokens of an item.

    Returns:
        The items, and R ascending arrays of them, see `balance`.
    """
    if sizes.groups is None:
        lengths = sizes.lengths[rows]
        items = Items(rows, np.arange(len(rows)), lengths, sizes.costs[rows])
        # Longer rows cost more, and integers are sorted in half the time.
        return items, balance(items.costs, num_ranks, sort_by(lengths.max() - lengths, items.of_rows))
    whole = _cut(sizes, rows, token_budget)
    best, ranks = whole, balance(whole.costs, num_ranks)
    costs = rank_costs(best.costs, ranks)
    last = np.argsort(-whole.costs, kind="stable")[-(len(whole.costs) % num_ranks or num_ranks) :]
    most = min(MAX_PARTS, int(np.bincount(whole.of_rows)[last].max()))
    for num_parts in range(2, most + 1) if imbalance(costs) > SPLIT_IMBALANCE else ():
        items = _split(sizes, whole, last, num_parts)
        assigned = balance(items.costs, num_ranks)
        if (found := rank_costs(items.costs, assigned)).max() < costs.max():
            best, ranks, costs = items, assigned, found
    return best, ranks


def _cut(sizes: RowSizes, rows: Rows, token_budget: int) -> Items:
    """Make an item of each group, or of one that exceeds the budget few items, each of rows that fit (best fit)."""
    assert sizes.groups is not None
    items = Items.of(sizes, rows, sizes.groups[rows])
    if not (too_large := items.lengths > token_budget).any():
        return items
    own, num_rows = _longest_first(sizes, items, too_large)
    firsts = rows[own[np.cumsum(num_rows) - num_rows]]
    bins = np.zeros(len(rows), dtype=np.int64)
    bins[own] = fill_fullest_each(sizes.responses[rows[own]], num_rows, token_budget - sizes.prompts[firsts])
    return Items.of(sizes, rows, items.of_rows * (int(bins.max()) + 1) + bins)


def _split(sizes: RowSizes, items: Items, chosen: Rows, num_parts: int) -> Items:
    """Split the chosen items evenly into so many parts, or into as many as they have rows."""
    is_chosen = np.zeros(len(items.lengths), dtype=np.bool_)
    is_chosen[chosen] = True
    own, num_rows = _longest_first(sizes, items, is_chosen)
    parts = np.zeros(len(items.rows), dtype=np.int64)
    parts[own] = fill_emptiest_each(sizes.responses[items.rows[own]], num_rows, num_parts)
    return Items.of(sizes, items.rows, items.of_rows * num_parts + parts)


def _longest_first(sizes: RowSizes, items: Items, chosen: NDArray[np.bool_]) -> tuple[Rows, Counts]:
    """Return where in `items.rows` those of the chosen items are, item by item and longest first, and their counts."""
    own = np.flatnonzero(chosen[items.of_rows])
    responses = sizes.responses[items.rows[own]]
    longest = int(responses.max())
    ordered = sort_by(items.of_rows[own] * (longest + 1) + longest - responses, own)
    return ordered, np.bincount(items.of_rows, minlength=len(chosen))[chosen]


def _first_of_each(keys: Rows) -> Rows:
    """Return the place of the first of each different key."""
    return np.unique(keys, return_index=True)[1]
