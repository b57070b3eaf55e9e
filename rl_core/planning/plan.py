"""The plan of a step: update membership, then ranks and micro-batches, from lengths alone.

N rows, R ranks. It runs once, on the driver; every worker takes its rows from the result, so no counts are
exchanged at run time and no rank can wait for a micro-batch that another doesn't have.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.balance import Costs, balance, rank_work, row_costs
from rl_core.planning.pack import Rows, check_budget, pack_ranks
from rl_core.views.integers import IntsLike, integers
from schemas.errors import PlanError
from schemas.plan import ForwardPlan, MicroBatch, RankPlan, StepPlan, UpdatePlan

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

    Rows without a loss token are left out and counted. The others are shuffled by the seed and dealt to the
    updates in equal shares, whatever the ranks and the budget; where there are fewer rows than updates, the
    plan has fewer updates. Micro-batches of a rank are even, and come costliest first: those of one number are
    alike on all ranks, and the peak of memory comes first.

    Args:
        prompt_lengths: [N] tokens.
        response_lengths: [N] tokens.
        loss_tokens: [N] response tokens that are trained.
        num_updates: Optimizer steps.
        num_ranks: Policy ranks.
        token_budget: The most prompt + response tokens of one micro-batch.
        seed: Of the shuffle.

    Returns:
        The plan; in each update all ranks have equally many micro-batches, empty ones (dummies) last.

    Raises:
        PlanError: No row has a loss token, a row that has some is longer than the budget, the arrays differ in
            length or hold impossible counts, or a number isn't positive.
        TypeError: Counts that are not integers.
    """
    prompts, responses, trained = (integers(counts) for counts in (prompt_lengths, response_lengths, loss_tokens))
    _check_numbers(num_updates=num_updates, num_ranks=num_ranks, token_budget=token_budget)
    _check_counts(prompts, responses, trained)
    lengths = prompts + responses
    live = np.flatnonzero(trained)
    if not len(live):
        raise PlanError(
            f"nothing to train on: none of the step's {len(lengths)} rows has a loss token; look at the"
            " rewards and the responses of this step"
        )
    check_budget(live, lengths, token_budget)
    costs = row_costs(lengths)
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(live)
    updates = []
    for share in np.array_split(shuffled, min(num_updates, len(live))):
        ranks = _plan_ranks(np.sort(share), lengths, costs, num_ranks, token_budget)
        num_loss_tokens = int(trained[share].sum())
        updates.append(UpdatePlan(**dict(ranks), num_loss_tokens=num_loss_tokens, num_live_sequences=len(share)))
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
    """Plan one pass over all rows that trains nothing, as for log-probs: no shuffle, no denominators.

    Args:
        prompt_lengths: [N] tokens.
        response_lengths: [N] tokens; a row without any takes part too.
        num_ranks: Ranks that run equally many forwards: sharded weights are gathered by collectives.
        token_budget: The most prompt + response tokens of one micro-batch.

    Returns:
        The plan; all ranks have equally many micro-batches, empty ones (dummies) last.

    Raises:
        PlanError: No row has a response token, a row is longer than the budget, the arrays differ in length or
            hold impossible counts, or a number isn't positive.
        TypeError: Counts that are not integers.
    """
    prompts, responses = integers(prompt_lengths), integers(response_lengths)
    _check_numbers(num_ranks=num_ranks, token_budget=token_budget)
    _check_counts(prompts, responses)
    if not responses.any():
        raise PlanError(f"nothing to score: none of the {len(responses)} rows has a response token")
    lengths = prompts + responses
    rows = np.arange(len(lengths), dtype=np.int64)
    check_budget(rows, lengths, token_budget)
    ranks = _plan_ranks(rows, lengths, row_costs(lengths), num_ranks, token_budget)
    return ForwardPlan(**dict(ranks), token_budget=token_budget)


def _plan_ranks(rows: Rows, lengths: Counts, costs: Costs, num_ranks: int, token_budget: int) -> RankPlan:
    """Balance rows over the ranks, and pack those of each rank into as many micro-batches."""
    ranks = [rows[members] for members in balance(costs[rows], num_ranks)]
    return RankPlan(
        ranks=tuple(_micro_batches(bins, lengths, costs) for bins in pack_ranks(ranks, lengths, token_budget)),
        rank_costs=tuple(rank_work(costs, ranks).tolist()),
    )


def _micro_batches(bins: Sequence[Rows], lengths: Counts, costs: Costs) -> tuple[MicroBatch, ...]:
    """Costliest first, not longest: ranks wait for each other's micro-batch of the same number, attention included."""
    ordered = sorted(bins, key=lambda rows: (not len(rows), -costs[rows].sum(), rows.tolist()))
    return tuple(MicroBatch(rows=tuple(rows.tolist()), num_tokens=int(lengths[rows].sum())) for rows in ordered)


def _check_numbers(**numbers: int) -> None:
    if min(numbers.values()) < 1:
        raise PlanError(f"{', '.join(f'{name} {value}' for name, value in numbers.items())}: each must be at least 1")


def _check_counts(prompts: Counts, responses: Counts, trained: Counts | None = None) -> None:
    trained = responses if trained is None else trained
    if not len(prompts) == len(responses) == len(trained):
        raise PlanError(
            f"there are {len(prompts)} prompt lengths, {len(responses)} response lengths and {len(trained)} counts of"
            " loss tokens; each needs one per row"
        )
    wrong = np.flatnonzero((prompts < 0) | (responses < 0) | (trained < 0) | (trained > responses))
    if len(wrong):
        row = int(wrong[0])
        raise PlanError(
            f"row {row} has {prompts[row]} prompt, {responses[row]} response and {trained[row]} loss tokens;"
            " counts can't be negative, and loss tokens are response tokens"
        )
