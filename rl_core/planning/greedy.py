"""Greedy assignment of items to bins. With many bins or many independent problems, numpy does many items at a time.

P problems, B bins in each, n items in all.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Numbers = NDArray[Any]

MIN_BINS = 256  # of one problem; with fewer, a heap is faster
MIN_PROBLEMS = 32  # with an item left, on average; with fewer, they are solved one by one


def sort_by(keys: Ints, rows: Ints) -> Ints:
    """Sort rows by ascending key, those of equal keys in order; to sort one integer for each is the fastest.

    Args:
        keys: [n] at least 0; with the bits of the largest row they must fit in 63 bits.
        rows: [n] at least 0.
    """
    num_bits = int(rows.max(initial=0)).bit_length()
    ordered: Ints = keys << num_bits
    ordered |= rows
    ordered.sort()
    ordered &= (1 << num_bits) - 1
    return ordered


def fill_emptiest(sizes: Numbers, num_bins: int) -> Ints:
    """Put each item, in order, into the bin with the smallest total so far; return the bins, [n].

    Among bins of equal totals it is the one with the fewest items, so that items of size 0 leave no bin empty; then
    the first one.

    Args:
        sizes: [n] at least 0.
        num_bins: B.
    """
    if num_bins >= MIN_BINS:
        return _fill_emptiest_by_blocks(sizes, num_bins)
    bins: list[int] = []
    heap = [(0, 0, index) for index in range(num_bins)]
    for size in sizes.tolist():
        total, count, index = heap[0]
        bins.append(index)
        heapq.heapreplace(heap, (total + size, count + 1, index))
    return np.array(bins, dtype=np.int64)


def fill_emptiest_each(sizes: Ints, num_items: Ints, num_bins: int) -> Ints:
    """Solve P problems as `fill_emptiest` does; return the bin of each item, [n], from 0 in every problem.

    Args:
        sizes: [n] the items' sizes, problem by problem; at least 0.
        num_items: [P] how many of the items each problem has.
        num_bins: B, of every problem.
    """
    if not _are_many(num_items):
        return _one_by_one(sizes, num_items, lambda items: fill_emptiest(items, num_bins))
    bins = np.empty(len(sizes), dtype=np.int64)
    unit = int(num_items.max()) + 1  # of a total, which is ranked before the number of items
    num_bits = num_bins.bit_length()
    added = (sizes * unit + 1) << num_bits
    state = np.repeat(np.arange(num_bins)[:, None], len(num_items), axis=1)  # the bin is in the lowest bits
    for item in _item_of_each(num_items):
        emptiest = state[:, : len(item)].min(axis=0)
        bins[item] = chosen = emptiest & ((1 << num_bits) - 1)
        state[chosen, np.arange(len(item))] = emptiest + added[item]
    return bins


def fill_fullest_each(sizes: Ints, num_items: Ints, capacity: int | Ints) -> Ints:
    """Put each item of each problem, in order, into the fullest bin that it fits in, else into a new one (best fit).

    Among bins of equal totals it is the first one.

    Args:
        sizes: [n] the items' sizes, problem by problem; from 0 to the capacity.
        num_items: [P] how many of the items each problem has.
        capacity: Of every bin, or [P] of each problem's.

    Returns:
        The bin of each item, [n], from 0 in every problem.
    """
    capacities = np.broadcast_to(np.asarray(capacity, dtype=np.int64), len(num_items))
    if not _are_many(num_items):
        rooms = iter(capacities.tolist())
        return _one_by_one(sizes, num_items, lambda items: _fill_fullest(items, next(rooms)))
    bins, num_bits = np.empty(len(sizes), dtype=np.int64), int(num_items.max()).bit_length()
    wanted = sizes.astype(np.uint64) << num_bits
    new = capacities[_most_first(num_items)].astype(np.uint64) << num_bits
    free = np.array([new])  # the bin is in the lowest bits; the last bin is always an empty one
    left = np.empty_like(free)
    for item in _item_of_each(num_items):
        own = slice(len(item))
        if (free[-1] < new + len(free) - 1).any():
            free = np.concatenate([free, [new + len(free)]])
            left = np.empty_like(free)
        # Where an item doesn't fit, the difference wraps around: a huge number.
        fullest = np.subtract(free[:, own], wanted[item], out=left[:, own]).min(axis=0)
        bins[item] = chosen = fullest & ((1 << num_bits) - 1)
        free[chosen, np.arange(len(item))] = fullest
    return bins


def _fill_emptiest_by_blocks(sizes: Numbers, num_bins: int) -> Ints:
    """Fill several bins per round: the next items go to the bins in order, until one that has been filled is emptier.

    From longest to shortest, nearly all rounds fill all bins, as an item is larger than the bins' differences.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    totals, counts = np.zeros(num_bins, dtype=sizes.dtype), np.zeros(num_bins, dtype=np.int64)
    at = 0
    while at < len(sizes):
        items = sizes[at : at + num_bins]
        emptiest = _by_total(totals, counts)[: len(items)]
        before = totals[emptiest]
        after = before + items
        # A bin that ties with a filled one waits for the next round, which compares their counts too.
        waits = before[1:] >= np.minimum.accumulate(after[:-1])
        num_filled = int(waits.argmax()) + 1 if waits.any() else len(items)
        filled = emptiest[:num_filled]
        bins[at : at + num_filled] = filled
        totals[filled] = after[:num_filled]
        counts[filled] += 1
        at += num_filled
    return bins


def _by_total(totals: Numbers, counts: Ints) -> Ints:
    """Sort bins by total, those of equal totals by count, then in order."""
    order = np.argsort(totals, kind="stable")
    ordered, num_items = totals[order], counts[order]
    # Equal totals of bins whose counts are not in order are rare; to sort by both takes longer.
    is_sorted = (ordered[1:] > ordered[:-1]) | (num_items[1:] >= num_items[:-1])
    return order if is_sorted.all() else np.lexsort((counts, totals))


def _fill_fullest(sizes: Ints, capacity: int) -> Ints:
    bins: list[int] = []
    free: list[tuple[int, int]] = []  # (free, bin), ascending
    for size in sizes.tolist():
        fit = bisect_left(free, (size, 0))
        num_free, index = free.pop(fit) if fit < len(free) else (capacity, len(free))
        bins.append(index)
        insort(free, (num_free - size, index))
    return np.array(bins, dtype=np.int64)


def _are_many(num_items: Ints) -> bool:
    return bool(num_items.sum() >= MIN_PROBLEMS * num_items.max(initial=1))


def _one_by_one(sizes: Ints, num_items: Ints, solve: Callable[[Ints], Ints]) -> Ints:
    return np.concatenate([solve(items) for items in np.split(sizes, np.cumsum(num_items)[:-1])])


def _item_of_each(num_items: Ints) -> Iterator[Ints]:
    """Yield the first item of every problem, then the second ones, and so on.

    Problems come by descending number of items, so that those with an item left are always the first ones.
    """
    order = _most_first(num_items)
    firsts, descending = (np.cumsum(num_items) - num_items)[order], -num_items[order]
    for at, num_left in enumerate(np.searchsorted(descending, -np.arange(num_items.max(initial=0))).tolist()):
        yield firsts[:num_left] + at


def _most_first(num_items: Ints) -> Ints:
    """Return the problems by descending number of items."""
    return np.argsort(-num_items, kind="stable")
