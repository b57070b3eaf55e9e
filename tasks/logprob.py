"""The scoring stages: log-probs of the stored responses under the policy (behavior) and the reference."""

from collections.abc import Sequence

import numpy as np

from infra.ray.ranks import WorkerGroup
from infra.stores.open import open_store
from infra.stores.step_columns import publish_handle
from infra.workers.launch import get_group
from rl_core.planning import plan_forward
from rl_core.planning.plan import rows_by_rank
from rl_core.views import decode_ints, with_column
from rl_core.views.integers import IntsLike
from schemas.batch import BatchHandle
from schemas.metrics import merge_metrics
from schemas.plan import ForwardPlan
from schemas.step import PolicyHandle, RunHandle, ScoredColumn, ScoreResult
from tasks.stage import stage


@stage("logprob")
async def score_behavior(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, groups: IntsLike | None = None
) -> ScoredColumn:
    """Add `behavior_logprobs`: the trainer's log-probs under the weights that sampled; see `plan_scoring`."""
    group = await get_group(run, "policy")
    plan = plan_scoring(run, batch, group, groups)
    return _with_results(run, batch, plan, await group.call("score", batch, plan, policy.version))


@stage("reference")
async def score_reference(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, groups: IntsLike | None = None
) -> ScoredColumn:
    """Add `reference_logprobs`: the log-probs under the frozen starting weights; see `plan_scoring`."""
    needs_worker = run.config.needs_reference_worker
    group = await get_group(run, "reference" if needs_worker else "policy")
    plan = plan_scoring(run, batch, group, groups)
    results = await group.call("score" if needs_worker else "score_reference", batch, plan)
    return _with_results(run, batch, plan, results)


def plan_scoring(run: RunHandle, batch: BatchHandle, group: WorkerGroup, groups: IntsLike | None = None) -> ForwardPlan:
    """Deal a batch's rows to the ranks that score them.

    Args:
        run: The run.
        batch: The rows.
        group: The ranks.
        groups: The group of each row, whose prompt is computed once if the config shares prompts; None: of no other.
    """
    packing = run.config.packing
    return plan_forward(
        decode_ints(batch.prompt_lengths),
        decode_ints(batch.response_lengths),
        num_ranks=len(group.ranks),
        token_budget=packing.token_budget,
        groups=groups,
        share_prompts=bool(packing.share_prompts),
    )


def _with_results(
    run: RunHandle, batch: BatchHandle, plan: ForwardPlan, results: Sequence[ScoreResult]
) -> ScoredColumn:
    puts = [result.put for result in results if result.put is not None]
    rows = rows_by_rank(plan)
    scored = with_column(batch, puts[0].dtypes, [put.chunk for put in puts], rows)
    stored = publish_handle(open_store(run), scored, [put.traffic for put in puts])
    return ScoredColumn(
        group=scored.groups[-1],
        traffic=stored.traffic,
        row_kl=_by_row(rows, results),
        telemetry=merge_metrics(result.telemetry for result in results),
    )


def _by_row(rows: np.ndarray, results: Sequence[ScoreResult]) -> tuple[float, ...] | None:
    """Return the ranks' per-row KL in the order of the batch."""
    values = np.array([value for result in results for value in result.row_kl])
    return tuple(values[np.argsort(rows)].tolist()) if values.size else None
