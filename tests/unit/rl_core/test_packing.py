"""Balancing of rows over ranks, and packing into bins."""

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_core.planning import imbalance, pack
from rl_core.planning.balance import balance, rank_costs, row_costs
from rl_core.planning.greedy import fill_emptiest
from rl_core.planning.pack import pack_ranks, split_bins
from schemas.plan import RankPlan


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.integers(1, 6))
def test_balance_is_never_worse_than_contiguous_blocks(costs: list[float], num_ranks: int) -> None:
    array = np.array(costs)
    ranks = balance(array, num_ranks)
    assert sorted(np.concatenate(ranks).tolist()) == list(range(len(costs)))
    ours = rank_costs(array, ranks)
    identity = rank_costs(array, np.array_split(np.arange(len(costs)), num_ranks))
    assert np.ptp(ours) <= np.ptp(identity)
    assert ours.max() <= identity.max()


def test_balance_keeps_contiguous_blocks_if_nothing_is_better() -> None:
    # Longest first ends at 7 and 5; contiguous blocks are even, 6 and 6, and so is the result of exchanges.
    assert [rows.tolist() for rows in balance(np.array([2.0, 2.0, 2.0, 3.0, 3.0]), 2)] == [[0, 1, 2], [3, 4]]
    assert [rows.tolist() for rows in balance(np.ones(6), 3)] == [[0, 1], [2, 3], [4, 5]]


def test_balance_exchanges_rows_if_longest_first_is_unbalanced() -> None:
    # Longest first: 0, 1, 4 cost 3 + 2 + 2, and 3, 2 cost 3 + 2. Half of the gap is 1: row 0 is exchanged for row 2.
    assert [rows.tolist() for rows in balance(np.array([3.0, 2.0, 2.0, 3.0, 2.0]), 2)] == [[1, 2, 4], [0, 3]]


def test_balance_of_a_skewed_order() -> None:
    # Contiguous blocks put 9 + 8 on one rank and 1 + 2 on the other.
    ranks = balance(np.array([9.0, 8.0, 1.0, 2.0]), 2)
    assert sorted(rank_costs(np.array([9.0, 8.0, 1.0, 2.0]), ranks)) == [10.0, 10.0]


def test_row_costs_count_attention_and_prompts() -> None:
    assert row_costs(np.array([10, 100]), quadratic=0.01).tolist() == [11.0, 200.0]
    assert row_costs(np.array([2**14])).tolist() == [2.0**15]


def test_imbalance_is_range_over_mean() -> None:
    assert imbalance(np.array([3.0, 1.0, 2.0])) == 1.0
    assert imbalance(np.zeros(2)) == 0.0
    for costs, expected in (((3.0, 1.0, 2.0), 1.0), ((0.0, 0.0), 0.0)):
        dummies = [0] * len(costs)
        plan = RankPlan(rows=[], micro_rows=dummies, micro_tokens=dummies, rank_costs=costs)
        assert plan.imbalance == expected


def test_pack_is_best_fit_longest_first() -> None:
    lengths = np.array([4, 7, 1, 2, 4, 2])
    # 7 leaves 3 in the first bin; 4 and 4 leave 2 in the second, which 2 fills; 2 and 1 fill the first.
    assert [rows.tolist() for rows in pack(np.arange(6), lengths, 10)] == [[1, 2, 5], [0, 3, 4]]


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 90))
def test_pack_needs_few_bins(lengths: list[int], budget: int) -> None:
    bins = pack(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), budget)
    tokens = [sum(lengths[row] for row in rows) for rows in bins]
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(len(rows) for rows in bins)
    assert max(tokens, default=0) <= budget
    # No two bins could be one, as the first row of the later one would have gone into the other.
    assert all(tokens[at] + tokens[other] > budget for other in range(len(bins)) for at in range(other))


def bins_of(ranks: list[list[int]], lengths: list[int] | np.ndarray, budget: int) -> list[list[list[int]]]:
    """Return the rows of the bins of each rank."""
    rows, sizes = pack_ranks([np.array(rank, dtype=np.int64) for rank in ranks], np.array(lengths), budget)
    bins = iter(np.split(rows, np.cumsum(sizes)[:-1]))
    return [[next(bins).tolist() for _ in rank] for rank in sizes]


def test_bins_are_even_if_the_rows_fit() -> None:
    # 5 and 4 open a bin each; 3 joins the 4, and 2 the 5.
    assert bins_of([[0, 1, 2, 3]], [2, 3, 4, 5], 10) == [[[0, 3], [1, 2]]]


def test_as_few_micro_batches_as_the_tokens_allow() -> None:
    # Twenty tokens fit into two bins of ten, though not evenly, as 5 + 4 and 5 + 3 leave no space for another 3.
    assert bins_of([[0, 1, 2, 3, 4]], [5, 5, 4, 3, 3], 10) == [[[0, 1], [2, 3, 4]]]
    # A rank of 6 + 6 needs two bins of ten, so the six tokens of the other rank are in two bins, too.
    assert bins_of([[0, 1], [2, 3]], [6, 6, 3, 3], 10) == [[[0], [1]], [[2], [3]]]


def test_a_rank_that_can_not_be_packed_evenly_has_its_bins_split() -> None:
    # These fit into eight bins of 29, yet not evenly into nine; the other rank needs nine, also for its tokens alone.
    rows = [20, 18, 18, 16, 15, 15, 14, 14, 13, 13, 11, 11, 10, 10, 9, 7, 7, 6, 5]
    assert len(pack(np.arange(len(rows)), np.array(rows), 29)) == 8
    assert np.bincount(fill_emptiest(np.array(rows), 9), weights=rows).max() > 29
    for others in ([20] * 9, [29] * 9):
        lengths = np.array(rows + others)
        bins, other_bins = bins_of([[*range(len(rows))], [*range(len(rows), len(lengths))]], lengths, 29)
        assert len(bins) == len(other_bins) == 9
        assert sorted(chain.from_iterable(bins)) == [*range(len(rows))]
        assert all(0 < lengths[part].sum() <= 29 for part in bins)


def test_split_bins_splits_the_fullest_then_adds_dummies() -> None:
    lengths = np.array([4, 3, 2, 1, 1])
    # [0, 1, 2] holds 9 tokens: 4 goes to one part, 3 and 2 to the other; [3, 4] holds only 2.
    bins = split_bins([np.array([3, 4]), np.array([0, 1, 2])], lengths, 3)
    assert [rows.tolist() for rows in bins] == [[3, 4], [0], [1, 2]]
    assert sorted(rows.tolist() for rows in split_bins(bins, lengths, 6)) == [[], [0], [1], [2], [3], [4]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(50, 90), st.integers(0, 40))
def test_split_bins_keep_rows_and_budget(lengths: list[int], budget: int, more: int) -> None:
    array = np.array(lengths, dtype=np.int64)
    whole = pack(np.arange(len(lengths)), array, budget)
    parts = split_bins(whole, array, len(whole) + more)
    assert len(parts) == len(whole) + more
    assert sorted(row for rows in parts for row in rows) == list(range(len(lengths)))
    assert max(int(array[rows].sum()) for rows in parts) <= budget
    assert sum(not len(rows) for rows in parts) == max(0, len(parts) - len(lengths))
