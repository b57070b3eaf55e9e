"""Assignment of rows to ranks at balanced cost.

n rows, R ranks, m rows of one rank. The cost of packed rows is a * sum(len) + b * sum(len^2): linear layers do work per
token, attention per pair of tokens. Tokens on different branches of a row are no such pairs.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.greedy import fill_emptiest, sort_by

Costs = NDArray[np.float64]
Rows = NDArray[np.int64]

# A layer of width H does about 24 H^2 len operations in its linear layers and 2 H len^2 in causal attention, so the
# ratio is 1 / (12 H); here H is about 1400. Balance hardly depends on the exact value, but with a power of two all
# costs and their sums are exact, so that the plan doesn't depend on the order of additions.
QUADRATIC_COST = 2.0**-14

IMBALANCE_TOLERANCE = 1e-4  # refinement stops here: far below the variation of a kernel's run time
MAX_EXCHANGES = 4  # per rank; converging ranks need about two
MIN_GAIN = 1e-3  # fraction of the gap between two ranks that an exchange must close


def row_costs(
    lengths: NDArray[np.int64], apart: NDArray[np.float64] | None = None, *, quadratic: float = QUADRATIC_COST
) -> Costs:
    """Compute each row's cost, float64 [n], in units of a token's linear work: len + quadratic * (len^2 - 2 * apart).

    Args:
        lengths: [n] prompt + response tokens; responses alone would miss most of the work.
        apart: [n] pairs of these of which neither attends to the other, as they are on different branches; None: none.
        quadratic: The cost of attention for a pair of tokens, in the same unit.
    """
    tokens = lengths.astype(np.float64)
    pairs = tokens**2 if apart is None else tokens**2 - 2 * apart
    return tokens + quadratic * pairs


def balance(costs: Costs, num_ranks: int, order: Rows | None = None) -> list[Rows]:
    """Assign rows to ranks at balanced cost: longest processing time first, then exchanges between unbalanced ranks.

    The result can be worse than a plain split into contiguous blocks, which is therefore returned unless the assignment
    improves on it: in max - min or in the largest rank's cost, with neither of them worse.

    Args:
        costs: [n] non-negative cost of each row.
        num_ranks: R.
        order: [n] positions by descending cost, those of equal cost in order, if the caller can sort them faster.

    Returns:
        R ascending arrays of positions in `costs`, each position in exactly one; some are empty if n < R.
    """
    blocks = np.array_split(np.arange(len(costs), dtype=np.int64), num_ranks)
    order = np.argsort(-costs, kind="stable") if order is None else order
    balanced = _refine(costs, _longest_first(costs, num_ranks, order))
    ours, theirs = rank_costs(costs, balanced), rank_costs(costs, blocks)
    gains = (np.ptp(theirs) - np.ptp(ours), theirs.max() - ours.max())
    return [np.sort(rows) for rows in balanced] if min(gains) >= 0 < max(gains) else blocks


def rank_costs(costs: Costs, ranks: Sequence[Rows]) -> Costs:
    """Sum the costs of each rank's rows: [R] float64."""
    return np.array([costs[rows].sum() for rows in ranks], dtype=np.float64)


def imbalance(costs: Costs) -> float:
    """Compute (max - min) / mean of the ranks' costs; 0 if they are equal, also if all are 0."""
    mean = float(costs.mean())
    return float(np.ptp(costs)) / mean if mean else 0.0


def _longest_first(costs: Costs, num_ranks: int, order: Rows) -> list[Rows]:
    """Assign rows, costliest first, to the cheapest rank so far (LPT, Graham 1969); return them by ascending cost."""
    ranks = fill_emptiest(costs[order], num_ranks)
    position = sort_by(ranks, np.arange(len(order)))
    stops = np.cumsum(np.bincount(ranks, minlength=num_ranks)).tolist()
    return [order[position[start:stop]][::-1] for start, stop in pairwise([0, *stops])]


def _refine(costs: Costs, ranks: list[Rows]) -> list[Rows]:
    """Exchange rows between the costliest rank and a cheaper one while that narrows the gap between the two.

    After an exchange both costs lie within the previous two, so that max - min and the largest cost never grow. It
    ends when the ranks are balanced, or no exchange helps the costliest one. `costs` are [n]; a rank's rows are sorted
    by ascending cost.
    """
    ranks, totals = list(ranks), rank_costs(costs, ranks)
    for _ in range(MAX_EXCHANGES * len(ranks)):
        if imbalance(totals) <= IMBALANCE_TOLERANCE:
            break
        *others, costliest = np.argsort(totals, kind="stable").tolist()
        for other in others:
            exchanged = _exchange(costs, ranks[costliest], ranks[other], float(totals[costliest] - totals[other]))
            if exchanged is not None:
                ranks[costliest], ranks[other] = exchanged
                totals[[costliest, other]] = rank_costs(costs, exchanged)
                break
        else:
            break
    return ranks


def _exchange(costs: Costs, heavy: Rows, light: Rows, gap: float) -> tuple[Rows, Rows] | None:
    """Move a row from `heavy` to `light`, in exchange for one row or none, to shrink the gap between them the most.

    The rows of both, [m] of [n], are sorted by ascending `costs`; light's cost is lower by `gap`. Returns both ranks
    after the exchange, sorted so; None if no exchange shrinks the gap.
    """
    given, taken = costs[heavy], np.concatenate([[0.0], costs[light]])  # taken[0]: no row in return
    if not len(heavy):
        return None
    wanted = given - gap / 2  # the cost to get back for each row that would close the gap
    above = np.searchsorted(taken, wanted)
    below, above = np.maximum(above - 1, 0), np.minimum(above, len(taken) - 1)
    nearest = np.where(np.abs(taken[below] - wanted) <= np.abs(taken[above] - wanted), below, above)
    distance = np.abs(taken[nearest] - wanted)  # half of the remaining gap
    at = int(distance.argmin())
    if 2 * distance[at] >= (1 - MIN_GAIN) * gap:
        return None
    back = int(nearest[at]) - 1
    rest, kept = np.delete(heavy, at), light
    if back >= 0:
        rest, kept = _insert(costs, rest, int(light[back])), np.delete(light, back)
    return rest, _insert(costs, kept, int(heavy[at]))


def _insert(costs: Costs, rows: Rows, row: int) -> Rows:
    return np.insert(rows, np.searchsorted(costs[rows], costs[row]), row)
