"""Rows to ranks, so that every rank has the same work.

n rows, R ranks. The cost of a packed row of sequences is a * sum(len) + b * sum(len^2): linear layers see
tokens, attention sees pairs of tokens.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A layer of width H does about 24 H^2 len operations in its linear layers and 2 H len^2 in causal attention,
# so the ratio is 1 / (12 H); H = 1024 here. Balance hardly depends on the exact value.
QUADRATIC_COST = 1 / (12 * 1024)


def row_costs(lengths: NDArray[np.int64], *, quadratic: float = QUADRATIC_COST) -> NDArray[np.float64]:
    """The cost of each row in units of one token's linear work: len + quadratic * len^2.

    Args:
        lengths: [n] prompt + response tokens; responses alone would miss most of the work.
        quadratic: Attention's work for a pair of tokens, in the same unit.

    Returns:
        [n] float64.
    """
    tokens = lengths.astype(np.float64)
    return tokens + quadratic * tokens**2


def balance(costs: NDArray[np.float64], num_ranks: int) -> list[NDArray[np.int64]]:
    """Assign rows to ranks: costliest first, each to the rank with the least work so far.

    Greedy assignment can be worse than doing nothing, so the identity (contiguous shares of the rows, in
    order) is kept unless the greedy one is at least as even by spread, max - min, and by its largest rank.

    Args:
        costs: [n] cost of each row.
        num_ranks: R.

    Returns:
        R ascending arrays of positions in `costs`, each position in exactly one; some are empty where n < R.
    """
    identity = [part.astype(np.int64) for part in np.array_split(np.arange(len(costs)), num_ranks)]
    greedy = _greedy(costs, num_ranks)
    greedy_work, identity_work = rank_work(costs, greedy), rank_work(costs, identity)
    if np.ptp(greedy_work) <= np.ptp(identity_work) and greedy_work.max() <= identity_work.max():
        return greedy
    return identity


def _greedy(costs: NDArray[np.float64], num_ranks: int) -> list[NDArray[np.int64]]:
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    # The number of rows breaks ties, so that rows without cost spread out too.
    ranks = [(0.0, 0, rank) for rank in range(num_ranks)]
    for row in np.argsort(-costs, kind="stable").tolist():
        work, count, rank = heapq.heappop(ranks)
        members[rank].append(row)
        heapq.heappush(ranks, (work + float(costs[row]), count + 1, rank))
    return [np.array(sorted(rows), dtype=np.int64) for rows in members]


def rank_work(costs: NDArray[np.float64], ranks: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """The summed cost of each rank's rows: [R] float64."""
    return np.array([costs[rows].sum() for rows in ranks], dtype=np.float64)


def imbalance(work: NDArray[np.float64]) -> float:
    """(max - min) / mean of the ranks' work; 0 is even, and so is no work at all."""
    mean = float(work.mean())
    return float(np.ptp(work)) / mean if mean else 0.0
