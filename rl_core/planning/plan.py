"""The plan of a step: update membership, then ranks and micro-batches, from lengths alone.

N rows, R ranks. Planning runs once, on the driver. Every worker takes its rows from the plan, so that ranks exchange no
counts at run time, and no rank waits for a micro-batch that another one doesn't have.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.balance import Costs, balance, rank_costs, row_costs
from rl_core.planning.greedy import sort_by
from rl_core.planning.pack import Rows, check_budget, pack_ranks
from rl_core.views.integers import IntsLike, as_int64, pack_ints
from schemas.errors import PlanError
from schemas.plan import ForwardPlan, RankPlan, StepPlan, UpdatePlan

Counts = NDArray[np.int64]


def plan_step(
    prompt_lengths: IntsLike,
    response_lengths: IntsLike,
    loss_tokens: IntsLike,
    *,
    num_updates: int,
    num_ranks: int,
    token_budget: int,
    seed: int,
) -> StepPlan:
    """Plan all updates of one step.

    Rows without a loss token are skipped and counted. The others are shuffled by the seed and split evenly among the
    updates, independently of the ranks and the budget; with fewer rows than updates, the plan has fewer updates. The
    micro-batches of a rank are balanced and sorted by descending cost: the i-th ones cost about the same on all ranks,
    and peak memory is reached first.

    Args:
        prompt_lengths: [N] tokens.
        response_lengths: [N] tokens.
        loss_tokens: [N] trained response tokens.
        num_updates: Optimizer steps.
        num_ranks: Policy ranks.
        token_budget: The maximum number of prompt + response tokens in a micro-batch.
        seed: Seed of the shuffle.

    Returns:
        The plan; in each update all ranks have the same number of micro-batches, empty ones (dummies) last.

    Raises:
        PlanError: No row has a loss token, a row with loss tokens is longer than the budget, the arrays differ in
            length or hold impossible counts, or a number isn't positive.
        TypeError: Counts that are not integers.

    Example:
        >>> options = {"num_updates": 1, "num_ranks": 2, "token_budget": 20, "seed": 0}
        >>> plan = plan_step([4, 4, 4, 4], [9, 5, 5, 1], [9, 5, 5, 1], **options)
        >>> [[micro.rows for micro in rank] for rank in plan.updates[0].ranks]
        [[(0, 3)], [(1, 2)]]
    """
    prompts, responses, trained = (as_int64(counts) for counts in (prompt_lengths, response_lengths, loss_tokens))
    _check_numbers(num_updates=num_updates, num_ranks=num_ranks, token_budget=token_budget)
    _check_counts(prompts, responses, trained)
    lengths = prompts + responses
    live = _live_rows(trained)
    check_budget(live, lengths, token_budget)
    costs = row_costs(lengths)
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(live)
    updates = []
    for rows in np.array_split(shuffled, min(num_updates, len(live))):
        chosen = np.zeros(len(lengths), dtype=bool)
        chosen[rows] = True
        ranks = _plan_ranks(np.flatnonzero(chosen), lengths, costs, num_ranks, token_budget)
        num_loss_tokens = int(trained[rows].sum())
        updates.append(UpdatePlan(**dict(ranks), num_loss_tokens=num_loss_tokens, num_live_sequences=len(rows)))
    return StepPlan(
        updates=tuple(updates),
        token_budget=token_budget,
        num_ranks=num_ranks,
        seed=seed,
        num_skipped_rows=len(lengths) - len(live),
    )


def plan_forward(
    prompt_lengths: IntsLike, response_lengths: IntsLike, *, num_ranks: int, token_budget: int
) -> ForwardPlan:
    """Plan one forward pass over all rows, such as for log-probs: without a shuffle or denominators.

    Args:
        prompt_lengths: [N] tokens.
        response_lengths: [N] tokens; rows with 0 are included.
        num_ranks: Ranks, which run the same number of forwards: sharded weights are gathered by collectives.
        token_budget: The maximum number of prompt + response tokens in a micro-batch.

    Returns:
        The plan; all ranks have the same number of micro-batches, empty ones (dummies) last.

    Raises:
        PlanError: No row has a response token, a row is longer than the budget, the arrays differ in length or
            hold impossible counts, or a number isn't positive.
        TypeError: Counts that are not integers.
    """
    prompts, responses = as_int64(prompt_lengths), as_int64(response_lengths)
    _check_numbers(num_ranks=num_ranks, token_budget=token_budget)
    _check_counts(prompts, responses)
    if not responses.any():
        raise PlanError(f"nothing to score: none of the {len(responses)} rows has a response token")
    lengths = prompts + responses
    rows = np.arange(len(lengths), dtype=np.int64)
    check_budget(rows, lengths, token_budget)
    ranks = _plan_ranks(rows, lengths, row_costs(lengths), num_ranks, token_budget)
    return ForwardPlan(**dict(ranks), token_budget=token_budget)


def _live_rows(trained: Counts) -> Rows:
    """Return the rows with a loss token, at least one."""
    live = np.flatnonzero(trained)
    if not len(live):
        raise PlanError(
            f"nothing to train on: none of the step's {len(trained)} rows has a loss token; inspect the rewards and"
            " responses of this step"
        )
    return live


def _plan_ranks(rows: Rows, lengths: Counts, costs: Costs, num_ranks: int, token_budget: int) -> RankPlan:
    """Balance rows over the ranks, and pack every rank's rows into the same number of micro-batches."""
    sizes = lengths[rows]
    # Longer rows cost more, and integers are sorted in half the time.
    order = sort_by(sizes.max() - sizes, np.arange(len(rows)))
    ranks = [rows[members] for members in balance(costs[rows], num_ranks, order)]
    packed, micro_rows, micro_tokens = _sort_bins(*pack_ranks(ranks, lengths, token_budget), lengths, costs)
    return RankPlan(
        rows=pack_ints(packed),
        micro_rows=pack_ints(micro_rows),
        micro_tokens=pack_ints(micro_tokens),
        rank_costs=tuple(rank_costs(costs, ranks).tolist()),
    )


def _sort_bins(rows: Rows, sizes: Counts, lengths: Counts, costs: Costs) -> tuple[Rows, Counts, Counts]:
    """Sort each rank's bins by cost, not by length: ranks wait for each other's i-th one, attention included.

    Bins of equal cost are sorted by their first row, empty ones are last.

    Args:
        rows: [n] rows, rank by rank and bin by bin.
        sizes: [R, B] number of rows of each bin.
        lengths: [N] tokens of every row of the batch.
        costs: [N] cost of every row of the batch.

    Returns:
        The rows, [n], and of each bin the number of rows and of tokens, [R * B].
    """
    num_ranks, num_bins = sizes.shape
    sizes = sizes.ravel()
    stops = np.cumsum(sizes)
    starts, bin_of_row = stops - sizes, np.repeat(np.arange(len(sizes)), sizes)
    cost = np.bincount(bin_of_row, weights=costs[rows], minlength=len(sizes))
    num_tokens = np.bincount(bin_of_row, weights=lengths[rows], minlength=len(sizes)).astype(np.int64)
    rank_of_bin = np.repeat(np.arange(num_ranks), num_bins)
    order = np.lexsort((rows[np.minimum(starts, len(rows) - 1)], -cost, sizes == 0, rank_of_bin))
    sizes = sizes[order]
    moved = np.repeat(starts[order] - (np.cumsum(sizes) - sizes), sizes)
    return rows[np.arange(len(rows)) + moved], sizes, num_tokens[order]


def _check_numbers(**numbers: int) -> None:
    if min(numbers.values()) < 1:
        raise PlanError(f"{', '.join(f'{name} {value}' for name, value in numbers.items())}: each must be at least 1")


def _check_counts(prompts: Counts, responses: Counts, trained: Counts | None = None) -> None:
    trained = responses if trained is None else trained
    if not len(prompts) == len(responses) == len(trained):
        raise PlanError(
            f"there are {len(prompts)} prompt lengths, {len(responses)} response lengths and {len(trained)} counts of"
            " loss tokens; expected one of each per row"
        )
    wrong = np.flatnonzero((prompts < 0) | (responses < 0) | (trained < 0) | (trained > responses))
    if len(wrong):
        row = int(wrong[0])
        raise PlanError(
            f"row {row} has {prompts[row]} prompt, {responses[row]} response and {trained[row]} loss tokens;"
            " counts can't be negative, and loss tokens are response tokens"
        )


def rank_rows(plans: Iterable[RankPlan], rank: int) -> NDArray[np.int64]:
    """Return the rows that a rank has in any of the plans, ascending; each row is in one of them."""
    return np.sort(np.concatenate([as_int64(plan.rank_rows(rank)) for plan in plans]))


def rows_by_rank(plan: RankPlan) -> NDArray[np.int64]:
    """Return all rows of a plan, rank by rank, ascending in each rank."""
    num_ranks = len(plan.rank_costs)
    num_rows = as_int64(plan.micro_rows).reshape(num_ranks, -1).sum(axis=1)
    return sort_by(np.repeat(np.arange(num_ranks), num_rows), as_int64(plan.rows))
