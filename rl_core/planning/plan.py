"""The plan of a step: update membership, then ranks and micro-batches, from lengths alone.

N rows, R ranks. It runs once, on the driver; every worker takes its rows from the result, so no counts are
exchanged at run time and no rank can wait for a micro-batch that another doesn't have.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.planning.balance import balance, imbalance, rank_work, row_costs
from rl_core.planning.pack import Rows, pack, split_bins
from schemas.errors import PlanError
from schemas.plan import MicroBatch, StepPlan, UpdatePlan


def plan_step(
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    loss_tokens: NDArray[np.int64],
    *,
    num_updates: int,
    num_ranks: int,
    token_budget: int,
    seed: int,
) -> StepPlan:
    """Plan all updates of one step.

    Rows without a loss token are left out and counted. The others are shuffled by the seed and dealt to the
    updates in equal shares, whatever the ranks and the budget; where there are fewer rows than updates, the
    plan has fewer updates. Micro-batches of a rank come fullest first: the peak of memory comes first.

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
        PlanError: No row has a loss token, or a row that has some is longer than the budget.
        ValueError: The arrays differ in length, hold impossible counts, or a number isn't positive.
    """
    prompts, responses, trained = (
        np.asarray(counts, dtype=np.int64) for counts in (prompt_lengths, response_lengths, loss_tokens)
    )
    _check_arguments(prompts, responses, trained, num_updates, num_ranks, token_budget)
    lengths = prompts + responses
    live = np.flatnonzero(trained)
    if not len(live):
        raise PlanError(
            f"nothing to train on: none of the step's {len(lengths)} rows has a loss token; look at the"
            " rewards and the responses of this step"
        )
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(live)
    shares = np.array_split(shuffled, min(num_updates, len(live)))
    return StepPlan(
        updates=tuple(
            UpdatePlan(
                ranks=_plan_ranks(np.sort(rows), lengths, num_ranks, token_budget),
                num_loss_tokens=int(trained[rows].sum()),
                num_live_sequences=len(rows),
            )
            for rows in shares
        ),
        token_budget=token_budget,
        num_ranks=num_ranks,
        seed=seed,
        num_skipped_rows=len(lengths) - len(live),
    )


def update_imbalance(update: UpdatePlan, lengths: NDArray[np.int64]) -> float:
    """(max - min) / mean of the ranks' cost in one update; `lengths` [N] are prompt + response tokens."""
    rows = [np.array([row for micro in rank for row in micro.rows], dtype=np.int64) for rank in update.ranks]
    return imbalance(rank_work(row_costs(lengths), rows))


def _plan_ranks(
    rows: Rows, lengths: NDArray[np.int64], num_ranks: int, token_budget: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Balance an update's rows over the ranks, pack each rank, and even out the numbers of micro-batches."""
    positions = balance(row_costs(lengths[rows]), num_ranks)
    packed = [pack(rows[members], lengths, token_budget) for members in positions]
    num_micros = max(len(bins) for bins in packed)
    return tuple(_micro_batches(split_bins(bins, lengths, num_micros), lengths) for bins in packed)


def _micro_batches(bins: Sequence[Rows], lengths: NDArray[np.int64]) -> tuple[MicroBatch, ...]:
    micros = [MicroBatch(rows=tuple(rows.tolist()), num_tokens=int(lengths[rows].sum())) for rows in bins]
    # Fullest first on every rank also lines up micro-batches of like size, which collectives wait for.
    return tuple(sorted(micros, key=lambda micro: (not micro.rows, -micro.num_tokens, micro.rows)))


def _check_arguments(
    prompts: NDArray[np.int64],
    responses: NDArray[np.int64],
    trained: NDArray[np.int64],
    num_updates: int,
    num_ranks: int,
    token_budget: int,
) -> None:
    if not prompts.shape == responses.shape == trained.shape or prompts.ndim != 1:
        raise ValueError(
            "prompt_lengths, response_lengths and loss_tokens must be three 1-D arrays of one length, not"
            f" {prompts.shape}, {responses.shape} and {trained.shape}"
        )
    wrong = np.flatnonzero((prompts < 0) | (trained < 0) | (trained > responses))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"row {row} has {prompts[row]} prompt, {responses[row]} response and {trained[row]} loss tokens;"
            " counts can't be negative, and loss tokens are response tokens"
        )
    if min(num_updates, num_ranks, token_budget) < 1:
        raise ValueError(
            f"num_updates {num_updates}, num_ranks {num_ranks} and token_budget {token_budget} must be at least 1"
        )
