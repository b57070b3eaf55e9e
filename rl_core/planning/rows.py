"""The rows that ranks read."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.greedy import sort_by
from rl_core.views.integers import as_int64
from schemas.plan import RankPlan


def rank_rows(plans: Iterable[RankPlan], rank: int) -> NDArray[np.int64]:
    """Return the rows that a rank has in any of the plans, ascending; each row is in one of them."""
    return np.sort(np.concatenate([as_int64(plan.rank_rows(rank)) for plan in plans]))


def rows_by_rank(plan: RankPlan) -> NDArray[np.int64]:
    """Return all rows of a plan, rank by rank, ascending in each rank."""
    num_ranks = len(plan.rank_costs)
    num_rows = as_int64(plan.micro_rows).reshape(num_ranks, -1).sum(axis=1)
    return sort_by(np.repeat(np.arange(num_ranks), num_rows), as_int64(plan.rows))
