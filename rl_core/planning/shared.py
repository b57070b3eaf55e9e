"""The items of a plan: rows that go into one micro-batch together, as they share the prompt of their group.

N rows in a batch, n of them to plan, m items, R ranks. In a micro-batch the prompt of a group is computed once: a
further row of the group adds only its response, whose attention is over prompt and response.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.balance import Costs, balance, imbalance, rank_costs, row_costs
from rl_core.planning.greedy import fill_fullest_each, sort_by
from rl_core.planning.pack import Counts, Lengths, Rows

_Run = tuple[int, int]  # the rows [start, stop)

SPLIT_IMBALANCE = 0.01  # of the ranks; above it, groups are split for balance, though each part computes the prompt


@dataclass(frozen=True, eq=False)
class RowSizes:
    """The tokens of a batch's rows, and what each costs alone.

    Attributes:
        prompts: [N] tokens.
        responses: [N] tokens.
        groups: [N] from 0; rows of the same group share their prompt. None: no rows share one.
        lengths: [N] prompt + response tokens.
        costs: [N] see `row_costs`.
        has_branches: Whether a row branches, so that a longer one may cost less.
    """

    prompts: Lengths
    responses: Lengths
    groups: Rows | None
    lengths: Lengths
    costs: Costs
    has_branches: bool

    @classmethod
    def of(
        cls, prompts: Lengths, responses: Lengths, groups: Rows | None = None, apart: Costs | None = None
    ) -> "RowSizes":
        """Return the sizes of rows; those of a group whose prompts are of unequal lengths share them by length.

        Args:
            prompts: [N] tokens.
            responses: [N] tokens.
            groups: [N] from 0; None: no rows share prompts.
            apart: [N] see `row_costs`; None: no row branches.
        """
        if groups is not None:
            _, group = np.unique(groups, return_inverse=True)
            _, groups = np.unique(group * (int(prompts.max(initial=0)) + 1) + prompts, return_inverse=True)
        lengths = prompts + responses
        return cls(prompts, responses, groups, lengths, row_costs(lengths, apart), apart is not None)

    def in_bins(self, rows: Rows, bins: Rows) -> tuple[Lengths, Costs]:
        """Return the tokens and cost, [n] each, that rows add to bins, in which a prompt counts for its first row.

        Args:
            rows: [n] rows, ascending in each bin.
            bins: [n] the bin of each.
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
    """Make items of rows; assign them to ranks at balanced cost, as R ascending arrays of items (`balance`).

    A group is one item, or as few as the budget allows. If that leaves ranks unbalanced, groups are dealt to one rank
    after another, so that each has as much as the next and at most one group goes on from one to the next.

    Args:
        sizes: Of all rows of the batch.
        rows: [n] the rows, ascending; none is longer than the budget.
        num_ranks: R.
        token_budget: The maximum number of tokens of an item.
    """
    if sizes.groups is None:
        lengths = sizes.lengths[rows]
        items = Items(rows, np.arange(len(rows)), lengths, sizes.costs[rows])
        # Longer rows cost more, unless they branch, and integers are sorted in half the time.
        order = None if sizes.has_branches else sort_by(lengths.max() - lengths, items.of_rows)
        return items, balance(items.costs, num_ranks, order)
    whole = _cut(sizes, rows, token_budget)
    ranks = balance(whole.costs, num_ranks)
    if len(whole.lengths) == len(rows):  # there is no group to split
        return whole, ranks
    costs = rank_costs(whole.costs, ranks)
    dealt = _deal_evenly(sizes, whole, num_ranks, costs) if imbalance(costs) > SPLIT_IMBALANCE else None
    if dealt is None:
        return whole, ranks
    items = Items.of(sizes, rows, whole.of_rows * num_ranks + dealt)
    rank_of = np.empty(len(items.lengths), dtype=np.int64)
    rank_of[items.of_rows] = dealt
    return items, [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]


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


def _deal_evenly(sizes: RowSizes, items: Items, num_ranks: int, costs: Costs) -> Rows | None:
    """Deal rows to ranks, item by item, up to the lowest limit with which they suffice: [n], the rank of each.

    None if that limit isn't below the costliest of the ranks' `costs`, [R], with whole items.
    """
    firsts = np.unique(items.of_rows, return_index=True)[1]
    prompts = row_costs(sizes.prompts[items.rows[firsts]])
    added = sizes.costs[items.rows] - prompts[items.of_rows]
    order = np.lexsort((-added, items.of_rows))
    deck = _Deck.of(added[order], np.bincount(items.of_rows), prompts)
    best, least, most = None, float(costs.mean()), float(costs.max())
    while most - least > SPLIT_IMBALANCE * least:
        limit = (least + most) / 2
        if (runs := deck.deal(num_ranks, limit)) is None:
            least = limit
        else:
            best, most = runs, limit
    if best is None:
        return None
    dealt = np.empty(len(order), dtype=np.int64)
    for start, stop, rank in best:
        dealt[order[start:stop]] = rank
    return dealt


@dataclass(frozen=True, eq=False)
class _Deck:
    """What n rows of m items add to their item's prompt, item by item, and the costliest first in each; and sums."""

    negated: list[float]  # n costs, negated, so that they ascend
    sums: list[float]  # n + 1, of the costs before each row
    stops: list[int]  # m + 1, where each item begins; then n
    prompts: list[float]  # m costs
    whole: list[float]  # m + 1, of the items before each, with their prompts

    @classmethod
    def of(cls, added: Costs, num_rows: Counts, prompts: Costs) -> "_Deck":
        sums, stops = np.append(0.0, np.cumsum(added)), np.append(0, np.cumsum(num_rows))
        whole = sums[stops] + np.append(0.0, np.cumsum(prompts))
        return cls((-added).tolist(), sums.tolist(), stops.tolist(), prompts.tolist(), whole.tolist())

    def deal(self, num_ranks: int, limit: float) -> list[tuple[int, int, int]] | None:
        """Deal rows to ranks, item by item and each rank up to a limit of cost: runs of rows, and their ranks.

        None: there are too few ranks. The time is one of ranks and runs, not of rows.
        """
        runs: list[tuple[int, int, int]] = []
        item, rank, room = 0, 0, limit
        while True:
            after = max(item, bisect_right(self.whole, self.whole[item] + room, item) - 1)  # those before it fit
            runs.append((self.stops[item], self.stops[after], rank))
            room -= self.whole[after] - self.whole[item]
            if after == len(self.prompts):
                return runs
            left, prompt, item = [(self.stops[after], self.stops[after + 1])], self.prompts[after], after + 1
            while left:
                taken, left, free = self._take(left, room - prompt)
                if not taken and room == limit:
                    return None  # a row alone costs more
                runs += [(start, stop, rank) for start, stop in taken]
                rank, room = (rank + 1, limit) if left else (rank, free)
                if rank == num_ranks:
                    return None

    def _take(self, left: list[_Run], free: float) -> tuple[list[_Run], list[_Run], float]:
        """Take each row that fits, in order: return runs of rows that are taken and left, and the cost that is free."""
        taken, kept = list[_Run](), list[_Run]()
        for start, stop in left:
            while start < stop:
                at = bisect_left(self.negated, -free, start, stop)  # the first that fits
                if at > start:
                    kept.append((start, at))
                start = at
                if at < stop:
                    start = max(at + 1, bisect_right(self.sums, self.sums[at] + free, at, stop + 1) - 1)
                    taken.append((at, start))
                    free -= self.sums[start] - self.sums[at]
        return taken, kept, free


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
