"""Rollout: bring the workers to the policy's version, generate and score."""

import asyncio
from typing import Any

from infra.cluster import call, get_worker
from schemas.rollout import RolloutHandle
from schemas.step import PolicyHandle, RunHandle
from tasks.publish import load_weights
from tasks.stage import stage


@stage("rollout")
async def generate_rollouts(run: RunHandle, policy: PolicyHandle) -> RolloutHandle:
    """Generate and score this step's samples; the rows stay with their workers."""
    shards = await on_all_workers(run, policy, "generate", policy.step, policy.version)
    return RolloutHandle(step=policy.step, policy_version=policy.version, shards=tuple(shards))


async def on_all_workers(run: RunHandle, policy: PolicyHandle, method: str, *args: object) -> list[Any]:
    """Call a method of every rollout worker, once it holds the policy's version; the answers are in shard order."""

    async def on_worker(shard: int) -> Any:
        worker = await get_worker(run, "rollout", shard)
        await load_weights(run, policy, worker)
        return await call(worker, method, *args)

    return await asyncio.gather(*map(on_worker, range(run.config.rollout.num_workers)))
