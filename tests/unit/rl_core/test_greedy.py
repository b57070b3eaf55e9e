"""Greedy packing: many items at a time give exactly what one item at a time does."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.planning import greedy

PROBLEMS = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=6)


def flat(problems: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([*chain.from_iterable(problems)], dtype=np.int64), np.array([len(items) for items in problems])


def test_the_emptiest_bin_then_the_one_with_the_fewest_items_then_the_first() -> None:
    assert greedy.fill_emptiest(np.array([3, 2, 2, 0, 0, 5]), 3).tolist() == [0, 1, 2, 1, 2, 1]


@given(st.lists(st.integers(0, 9) | st.floats(0, 9), max_size=40), st.integers(1, 8))
def test_whole_blocks_of_items_fill_the_same_bins(sizes: list[float], num_bins: int) -> None:
    for array in (np.array(sizes, dtype=np.float64), np.sort(np.array(sizes, dtype=np.float64))[::-1]):
        expected = greedy.fill_emptiest(array, num_bins)
        assert greedy._fill_emptiest_by_blocks(array, num_bins).tolist() == expected.tolist()


def test_bins_of_equal_totals_are_filled_by_their_number_of_items() -> None:
    sizes = np.random.default_rng(0).integers(0, 4, 3000)
    assert greedy._fill_emptiest_by_blocks(sizes, 300).tolist() == one_at_a_time(sizes.tolist(), 300)


def one_at_a_time(sizes: list[int], num_bins: int) -> list[int]:
    state, bins = [(0, 0, index) for index in range(num_bins)], []
    for size in sizes:
        total, count, index = min(state)
        state[index] = (total + size, count + 1, index)
        bins.append(index)
    return bins


@given(PROBLEMS, st.integers(1, 5))
def test_many_problems_at_once_fill_the_same_bins(problems: list[list[int]], num_bins: int) -> None:
    sizes, num_items = flat(problems)
    one_by_one = [greedy.fill_emptiest(np.array(items, dtype=np.int64), num_bins).tolist() for items in problems]
    assert in_step(greedy.fill_emptiest_each, sizes, num_items, num_bins) == [*chain.from_iterable(one_by_one)]


@given(PROBLEMS, st.integers(9, 12))
def test_many_problems_at_once_fill_the_fullest_bins(problems: list[list[int]], capacity: int) -> None:
    sizes, num_items = flat(problems)
    one_by_one = [greedy._fill_fullest(np.array(items, dtype=np.int64), capacity).tolist() for items in problems]
    assert in_step(greedy.fill_fullest_each, sizes, num_items, capacity) == [*chain.from_iterable(one_by_one)]


def in_step(solve, sizes: np.ndarray, num_items: np.ndarray, limit: int) -> list[int]:  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy, "MIN_PROBLEMS", 0)
        return solve(sizes, num_items, limit).tolist()


def test_rows_are_sorted_by_key_then_row() -> None:
    assert greedy.sort_by(np.array([1, 0, 1, 0]), np.array([7, 9, 3, 2])).tolist() == [2, 9, 3, 7]
    assert greedy.sort_by(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
