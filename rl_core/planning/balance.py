"""Rows to ranks, so that every rank has the same work.

n rows, R ranks, m rows of one rank. The cost of packed rows is a * sum(len) + b * sum(len^2): linear layers see
tokens, attention sees pairs of tokens.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Rows = NDArray[np.int64]

# A layer of width H does about 24 H^2 len operations in its linear layers and 2 H len^2 in causal attention, so the
# ratio is 1 / (12 H); here H is about 1400. Balance hardly depends on the exact value, but with a power of two every
# cost and sum of costs is exact: the same plan whatever the order of additions.
QUADRATIC_COST = 2.0**-14

EVEN_ENOUGH = 1e-4  # the spread, over the mean, at which refinement stops: far below what a kernel's time varies by
MAX_EXCHANGES = 4  # for each rank; those that converge take about two
LEAST_GAIN = 1e-3  # of the gap between two ranks; a smaller one is not worth an exchange


def row_costs(lengths: NDArray[np.int64], *, quadratic: float = QUADRATIC_COST) -> Costs:
    """The cost of each row in units of one token's linear work: len + quadratic * len^2.

    Args:
        lengths: [n] prompt + response tokens; responses alone would miss most of the work.
        quadratic: Attention's work for a pair of tokens, in the same unit.

    Returns:
        [n] float64.
    """
    tokens = lengths.astype(np.float64)
    return tokens + quadratic * tokens**2


def balance(costs: Costs, num_ranks: int) -> list[Rows]:
    """Assign rows to ranks evenly: longest processing time first, then exchanges between uneven ranks.

    Either may be worse than doing nothing, so the identity (contiguous shares of the rows, in order) is kept unless
    the assignment is better: not worse by spread, max - min, nor by its largest rank, and better by one of them.

    Args:
        costs: [n] non-negative cost of each row.
        num_ranks: R.

    Returns:
        R ascending arrays of positions in `costs`, each position in exactly one; some are empty where n < R.
    """
    identity = np.array_split(np.arange(len(costs), dtype=np.int64), num_ranks)
    even = _refine(costs, _longest_first(costs, num_ranks))
    ours, theirs = rank_work(costs, even), rank_work(costs, identity)
    gains = (np.ptp(theirs) - np.ptp(ours), theirs.max() - ours.max())
    return [np.sort(rows) for rows in even] if min(gains) >= 0 < max(gains) else identity


def rank_work(costs: Costs, ranks: Sequence[Rows]) -> Costs:
    """The summed cost of each rank's rows: [R] float64."""
    return np.array([costs[rows].sum() for rows in ranks], dtype=np.float64)


def imbalance(work: Costs) -> float:
    """(max - min) / mean of the ranks' work; 0 is even, and so is no work at all."""
    mean = float(work.mean())
    return float(np.ptp(work)) / mean if mean else 0.0


def _longest_first(costs: Costs, num_ranks: int) -> list[Rows]:
    """Costliest row first, each to the rank with the least work so far (LPT, Graham 1969); ascending costs."""
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    # The number of rows breaks ties, so that rows without cost spread out too.
    heap = [(0.0, 0, rank) for rank in range(num_ranks)]
    order = np.argsort(-costs, kind="stable")
    for row, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        work, count, rank = heap[0]
        members[rank].append(row)
        heapq.heapreplace(heap, (work + cost, count + 1, rank))
    return [np.array(rows[::-1], dtype=np.int64) for rows in members]


def _refine(costs: Costs, ranks: list[Rows]) -> list[Rows]:
    """Exchange rows of the costliest rank for those of a cheaper one, while that narrows the gap between the two.

    Neither of the two becomes costlier than the costlier was, nor cheaper than the cheaper, so that the spread and
    the largest rank never grow. It ends when the ranks are even, or nothing helps the costliest.

    Args:
        costs: [n] cost of each row.
        ranks: R arrays of rows, each by ascending cost.
    """
    ranks, work = list(ranks), rank_work(costs, ranks)
    for _ in range(MAX_EXCHANGES * len(ranks)):
        if imbalance(work) <= EVEN_ENOUGH:
            break
        *others, costliest = np.argsort(work, kind="stable").tolist()
        for other in others:
            exchanged = _exchange(costs, ranks[costliest], ranks[other], float(work[costliest] - work[other]))
            if exchanged is not None:
                ranks[costliest], ranks[other] = exchanged
                work[[costliest, other]] = rank_work(costs, exchanged)
                break
        else:
            break
    return ranks


def _exchange(costs: Costs, heavy: Rows, light: Rows, gap: float) -> tuple[Rows, Rows] | None:
    """Give one row of `heavy` to `light`, for one row or none, so that the gap between them shrinks the most.

    Args:
        costs: [n] cost of each row.
        heavy: [m] rows by ascending cost.
        light: Rows of a rank whose cost is lower by `gap`, by ascending cost.
        gap: At least 0.

    Returns:
        Both ranks afterwards, by ascending cost; None if nothing shrinks the gap.
    """
    given, taken = costs[heavy], np.concatenate([[0.0], costs[light]])  # the first stands for no row
    if not len(heavy):
        return None
    wanted = given - gap / 2  # what should come back for each row, to end even
    above = np.searchsorted(taken, wanted)
    below, above = np.maximum(above - 1, 0), np.minimum(above, len(taken) - 1)
    nearest = np.where(np.abs(taken[below] - wanted) <= np.abs(taken[above] - wanted), below, above)
    distance = np.abs(taken[nearest] - wanted)  # half of the gap that remains
    at = int(distance.argmin())
    if 2 * distance[at] >= (1 - LEAST_GAIN) * gap:
        return None
    back = int(nearest[at]) - 1
    rest, kept = np.delete(heavy, at), light
    if back >= 0:
        rest, kept = _insert(costs, rest, int(light[back])), np.delete(light, back)
    return rest, _insert(costs, kept, int(heavy[at]))


def _insert(costs: Costs, rows: Rows, row: int) -> Rows:
    return np.insert(rows, np.searchsorted(costs[rows], costs[row]), row)
