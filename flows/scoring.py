"""The scoring of a step's rows by the policy and, with a KL term, by the reference."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from flows.phases import PhaseTimer
from infra.workers.placement import score_together
from rl_core.views import with_groups
from schemas.batch import BatchHandle
from schemas.step import PolicyHandle, RunHandle, ScoredColumn
from tasks.logprob import score_behavior, score_reference

Result = TypeVar("Result")


async def score_batch(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, phase: PhaseTimer
) -> dict[str, ScoredColumn]:
    """Put the rows' `behavior_logprobs`, unless the update computes them, and, with a KL term, `reference_logprobs`.

    Both are computed at the same time where that is faster.

    Returns:
        The columns, to be added to the batch in this order, by stage. They don't depend on what ran together.
    """
    if run.config.scores_behavior and score_together(run.config):
        # A phase is what the step waits for: `reference` only lasts for as long as the reference takes longer.
        async with in_background(score_reference(run, policy, batch)) as scoring:
            scoring.add_done_callback(phase.background("reference scoring"))
            with phase("logprob"):
                behavior = await score_behavior(run, policy, batch)
            with phase("reference"):
                return {"logprob": behavior, "reference": await scoring}
    scores: dict[str, ScoredColumn] = {}
    if run.config.scores_behavior:
        with phase("logprob"):
            scores["logprob"] = await score_behavior(run, policy, batch)
    if run.config.kl.coef:
        with phase("reference"):
            scored = with_groups(batch, [score.group for score in scores.values()])
            scores["reference"] = await score_reference(run, policy, scored)
    return scores


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, Result]) -> AsyncIterator[asyncio.Task[Result]]:
    """Run `work` during the block, and wait until it has ended, whatever happens to the block.

    Work whose block failed is not cancelled: that would kill the workers on which it runs.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        await asyncio.gather(task, return_exceptions=True)  # cancels it if this is cancelled
