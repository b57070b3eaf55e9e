"""The plan of a step: update membership, then ranks and micro-batches, from lengths alone.

N rows, R ranks. Planning runs once, on the driver. Every worker takes its rows from the plan, so that ranks exchange no
counts at run time, and no rank waits for a micro-batch that another one doesn't have.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.greedy import sort_by
from rl_core.planning.pack import Rows, check_budget, pack_ranks
from rl_core.planning.shared import RowSizes, balance_items
from rl_core.views.integers import IntsLike, as_int64, pack_ints
from schemas.errors import PlanError
from schemas.plan import ForwardPlan, RankPlan, StepPlan, UpdatePlan

Counts = NDArray[np.int64]
PairsLike = NDArray[Any] | Sequence[float | None]  # counts, which may exceed 2^31; none is None
PrefixesLike = tuple[IntsLike, IntsLike] | None


def plan_step(
    prompt_lengths: IntsLike,
    response_lengths: IntsLike,
    loss_tokens: IntsLike,
    *,
    num_updates: int,
    num_ranks: int,
    token_budget: int,
    seed: int,
    groups: IntsLike | None = None,
    prefixes: PrefixesLike = None,
    pairs_apart: PairsLike = (),
) -> StepPlan:
    """Plan all updates of one step.

    Rows without a loss token are skipped and counted. The others are shuffled by the seed, group by group, and split
    evenly among the updates, independently of the ranks, the budget and `prefixes`; with fewer rows than updates,
    the plan has fewer updates. The micro-batches of a rank are balanced and sorted by descending cost: the i-th ones
    cost about the same on all ranks, and peak memory is reached first.

    Args:
        prompt_lengths: [N] tokens.
        response_lengths: [N] tokens.
        loss_tokens: [N] trained response tokens.
        num_updates: Optimizer steps.
        num_ranks: Policy ranks.
        token_budget: The maximum number of prompt + response tokens in a micro-batch.
        seed: Seed of the shuffle.
        groups: [N] non-negative numbers, equal for rows that stay together in an update. None: each row is a group.
        prefixes: [N] numbers, equal for rows that begin with the same tokens, such as a prompt, which are computed, and
            count, once in a micro-batch; and [N] how many tokens these are. None: there are none.
        pairs_apart: [N] pairs of each row's tokens that are on different branches, which cost nothing; empty: no row
            branches.

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
    numbers = _group_numbers(groups, len(lengths))
    sizes = _row_sizes(prompts, responses, prefixes, pairs_apart)
    updates = []
    for rows in np.array_split(_shuffled(live, numbers, seed), min(num_updates, len(live))):
        chosen = np.zeros(len(lengths), dtype=bool)
        chosen[rows] = True
        ranks = _plan_ranks(np.flatnonzero(chosen), sizes, num_ranks, token_budget)
        num_loss_tokens = int(trained[rows].sum())
        updates.append(
            UpdatePlan(
                **dict(ranks),
                num_loss_tokens=num_loss_tokens,
                num_live_sequences=len(rows),
                num_observation_tokens=int(responses[rows].sum()) - num_loss_tokens,
            )
        )
    return StepPlan(
        updates=tuple(updates),
        token_budget=token_budget,
        num_ranks=num_ranks,
        seed=seed,
        num_skipped_rows=len(lengths) - len(live),
    )


def plan_forward(
    prompt_lengths: IntsLike,
    response_lengths: IntsLike,
    *,
    num_ranks: int,
    token_budget: int,
    prefixes: PrefixesLike = None,
    pairs_apart: PairsLike = (),
) -> ForwardPlan:
    """Plan one forward pass over all rows, without a shuffle or denominators; dummies are last, as in `plan_step`.

    Args:
        prompt_lengths: [N] tokens.
        response_lengths: [N] tokens; rows with 0 are included.
        num_ranks: Ranks, which run the same number of forwards: sharded weights are gathered by collectives.
        token_budget: The maximum number of prompt + response tokens in a micro-batch.
        prefixes: See `plan_step`.
        pairs_apart: See `plan_step`.

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
    sizes = _row_sizes(prompts, responses, prefixes, pairs_apart)
    ranks = _plan_ranks(rows, sizes, num_ranks, token_budget)
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


def _group_numbers(groups: IntsLike | None, num_rows: int) -> Counts | None:
    """Return the group of each row, if any are given: [N]."""
    if groups is None:
        return None
    numbers = as_int64(groups)
    if len(numbers) != num_rows:
        raise PlanError(f"there are {len(numbers)} group numbers for {num_rows} rows; expected one of each per row")
    return numbers


def _row_sizes(prompts: Counts, responses: Counts, prefixes: PrefixesLike, pairs_apart: PairsLike) -> RowSizes:
    """Return the sizes of rows, which share what they begin with in common."""
    lengths, apart = prompts + responses, _check_apart(pairs_apart, len(prompts))
    if prefixes is None:
        return RowSizes.of(prompts, responses, None, apart)
    numbers, common = (as_int64(values) for values in prefixes)
    if not len(numbers) == len(common) == len(lengths) or ((common < 0) | (common > prompts)).any():
        raise PlanError(
            f"there are {len(numbers)} numbers and {len(common)} lengths of what {len(lengths)} rows begin with; "
            "expected one of each per row, and none longer than its prompt"
        )
    return RowSizes.of(common, lengths - common, numbers, apart)


def _check_apart(pairs_apart: PairsLike, num_rows: int) -> NDArray[np.float64] | None:
    """Return the pairs of tokens on different branches of each row: [N]; None if no row branches."""
    apart = np.asarray(pairs_apart, dtype=np.float64)
    if not apart.size:
        return None
    if apart.shape != (num_rows,):
        raise PlanError(f"there are {apart.size} counts of pairs for {num_rows} rows; expected one of each per row")
    return apart


def _shuffled(rows: Rows, groups: Counts | None, seed: int) -> Rows:
    """Return the rows, groups in random order and each group's rows together."""
    random = np.random.Generator(np.random.PCG64(seed))
    if groups is None:
        return random.permutation(rows)
    _, first, group = np.unique(groups[rows], return_index=True, return_inverse=True)
    place = np.empty(len(rows), dtype=np.int64)
    place[random.permutation(np.sort(first))] = np.arange(len(first))
    return sort_by(place[first][group], rows)


def _plan_ranks(rows: Rows, sizes: RowSizes, num_ranks: int, token_budget: int) -> RankPlan:
    """Balance rows over the ranks, and pack every rank's rows into the same number of micro-batches."""
    items, ranks = balance_items(sizes, rows, num_ranks, token_budget)
    packed, num_items = pack_ranks(ranks, items.lengths, token_budget)
    packed, num_rows = items.expand(packed, num_items.ravel())
    return _sort_bins(packed, num_rows.reshape(num_items.shape), sizes)


def _sort_bins(rows: Rows, num_rows: Counts, sizes: RowSizes) -> RankPlan:
    """Return the plan of bins sorted by cost, not by length: ranks wait for each other's i-th one, attention included.

    Bins of equal cost are sorted by their first row, empty ones are last. `rows` [n] are given rank by rank and bin by
    bin, `num_rows` [R, B] of each bin, ascending in it; `sizes` are those of all rows of the batch.
    """
    num_ranks, num_bins = num_rows.shape
    counts = num_rows.ravel()
    stops = np.cumsum(counts)
    starts, bin_of_row = stops - counts, np.repeat(np.arange(len(counts)), counts)
    tokens, costs = (
        np.bincount(bin_of_row, weights=added, minlength=len(counts)) for added in sizes.in_bins(rows, bin_of_row)
    )
    rank_of_bin = np.repeat(np.arange(num_ranks), num_bins)
    order = np.lexsort((rows[np.minimum(starts, len(rows) - 1)], -costs, counts == 0, rank_of_bin))
    counts = counts[order]
    moved = np.repeat(starts[order] - (np.cumsum(counts) - counts), counts)
    return RankPlan(
        rows=pack_ints(rows[np.arange(len(rows)) + moved]),
        micro_rows=pack_ints(counts),
        micro_tokens=pack_ints(tokens.astype(np.int64)[order]),
        rank_costs=tuple(costs.reshape(num_ranks, num_bins).sum(axis=1).tolist()),
    )


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
