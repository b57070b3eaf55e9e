"""The scoring stages: log-probs of the stored responses under the policy (behavior), the reference and the teachers."""

import asyncio
from collections.abc import Sequence

import numpy as np

from infra.ray.actors import call
from infra.ray.ranks import WorkerGroup
from infra.stores.open import open_store
from infra.stores.step_columns import publish_handle
from infra.workers.launch import get_group
from infra.workers.layout import teacher_workers
from infra.workers.placement import score_together
from rl_core.planning import plan_forward
from rl_core.planning.plan import PairsLike, rows_by_rank
from rl_core.views import decode_ints, number_prompts, select, with_column
from schemas.batch import BatchHandle
from schemas.metrics import merge_metrics
from schemas.plan import ForwardPlan
from schemas.step import PolicyHandle, RunHandle, ScoredColumn, ScoreResult, TeacherRows
from tasks.stage import stage


@stage("logprob")
async def score_behavior(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, apart: PairsLike = ()
) -> ScoredColumn:
    """Add `behavior_logprobs`: the trainer's log-probs under the weights that sampled; see `plan_scoring`."""
    group = await get_group(run, "policy")
    plan = plan_scoring(run, batch, group, apart)
    results = await group.call("score", batch, plan, policy.version)
    return _with_results(run, batch, rows_by_rank(plan), results)


@stage("reference")
async def score_reference(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, apart: PairsLike = ()
) -> ScoredColumn:
    """Add `reference_logprobs`: the log-probs under the frozen starting weights; see `plan_scoring`."""
    needs_worker = run.config.needs_reference_worker
    group = await get_group(run, "reference" if needs_worker else "policy")
    plan = plan_scoring(run, batch, group, apart)
    results = await group.call("score" if needs_worker else "score_reference", batch, plan)
    return _with_results(run, batch, rows_by_rank(plan), results)


@stage("teacher")
async def score_teachers(run: RunHandle, policy: PolicyHandle, batch: BatchHandle) -> ScoredColumn:
    """Add `teacher_logprobs`: each row's log-probs under its teacher, given the prompt that this one reads."""
    assert run.config.distillation is not None, "a run without teachers has no such stage"
    scoring = [_score_teacher(run, policy, batch, name) for name in run.config.distillation.teachers]
    parts = await asyncio.gather(*scoring) if score_together(run.config) else [await each for each in scoring]
    rows = np.concatenate([rows for rows, _ in parts])
    return _with_results(run, batch, rows, [result for _, results in parts for result in results])


async def _score_teacher(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, name: str
) -> tuple[np.ndarray, list[ScoreResult]]:
    """Have a teacher score its rows; return these, rank by rank, and the ranks' results."""
    numbers = teacher_workers(run.config).get(name)
    group = await (get_group(run, "teacher", numbers) if numbers else get_group(run, "policy"))
    own: TeacherRows = await call(group.ranks[0], "teacher_rows", batch, name)
    rows = decode_ints(own.rows)
    if not len(rows):
        return rows, []
    mine = select(batch, rows)
    lengths = decode_ints(own.prompt_lengths or mine.prompt_lengths)
    prompts = number_prompts(mine) if own.prompts is None else decode_ints(own.prompts)
    plan = plan_forward(
        lengths,
        decode_ints(mine.response_lengths),
        num_ranks=len(group.ranks),
        token_budget=run.config.packing.token_budget,
        prefixes=(prompts, lengths) if own.shares_prompts else None,
    )
    how = ("score", mine, plan) if numbers else ("score_teacher", mine, plan, name, policy.version)
    return rows[rows_by_rank(plan)], await group.call(*how)


def plan_scoring(run: RunHandle, batch: BatchHandle, group: WorkerGroup, apart: PairsLike = ()) -> ForwardPlan:
    """Deal a batch's rows to the ranks that score them; a prompt is computed once for its rows if the config says so.

    Args:
        run: The run.
        batch: The rows.
        group: The ranks.
        apart: Pairs of tokens on different branches of each row; empty: no row branches.
    """
    packing, lengths = run.config.packing, decode_ints(batch.prompt_lengths)
    return plan_forward(
        lengths,
        decode_ints(batch.response_lengths),
        num_ranks=len(group.ranks),
        token_budget=packing.token_budget,
        prefixes=(number_prompts(batch), lengths) if packing.share_prompts else None,
        pairs_apart=apart,
    )


def _with_results(run: RunHandle, batch: BatchHandle, rows: np.ndarray, results: Sequence[ScoreResult]) -> ScoredColumn:
    puts = [result.put for result in results if result.put is not None]
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
