"""Rollout: bring the workers to the policy's version, generate and score, then put the rows."""

import asyncio
from typing import Any

from infra.cluster import call, get_worker
from infra.stores.ray import RayColumnStore
from rl_core.views import new_batch
from schemas.batch import BatchHandle
from schemas.rollout import RolloutHandle
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.publish import load_weights
from tasks.stage import operation, stage


@stage("rollout")
async def generate_rollouts(run: RunHandle, policy: PolicyHandle) -> RolloutHandle:
    """Generate and score this step's samples; the rows stay with their workers."""
    shards = await _on_all_workers(run, policy, "generate", policy.step, policy.version)
    return RolloutHandle(step=policy.step, policy_version=policy.version, shards=tuple(shards))


@stage("put")
async def put_columns(run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle) -> BatchHandle:
    """Let every rollout worker put its own rows; a worker that lost them makes the same ones again."""
    RayColumnStore(run.run_id).open_lease(run.run_id, policy.step)
    results = await _on_all_workers(run, policy, "put", policy.step, policy.version)
    return new_batch(
        run_id=run.run_id,
        step=policy.step,
        policy_version=policy.version,
        chunks=[result.chunk for result in results],
        dtypes=results[0].dtypes,
        prompt_lengths=rollout.prompt_lengths,
        response_lengths=rollout.response_lengths,
    )


@operation("evaluate")
async def evaluate_policy(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    """Score the held-out prompts under the policy."""
    worker = await get_worker(run, "rollout")
    await load_weights(run, policy, worker)
    return await call(worker, "evaluate", policy.version)


async def _on_all_workers(run: RunHandle, policy: PolicyHandle, method: str, *args: int) -> list[Any]:
    async def on_worker(shard: int) -> Any:
        worker = await get_worker(run, "rollout", shard)
        await load_weights(run, policy, worker)
        return await call(worker, method, *args)

    return await asyncio.gather(*map(on_worker, range(run.config.rollout.num_workers)))
