"""Publish: the policy's weights go from worker to worker, never through the driver."""

import asyncio
from typing import Any

from infra.cluster import call, get_worker
from infra.group import get_group
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import operation


@operation("publish")
async def publish_weights(run: RunHandle, policy: PolicyHandle) -> None:
    """Load the policy's version into every rollout worker, in place."""
    workers = [await get_worker(run, "rollout", shard) for shard in range(run.config.rollout.num_workers)]
    await asyncio.gather(*(load_weights(run, policy, worker) for worker in workers))


async def load_weights(run: RunHandle, policy: PolicyHandle, worker: Any) -> None:
    """Bring one rollout worker to the policy's version; nothing moves if it is there already."""
    if await call(worker, "version") == policy.version:
        return
    group = await get_group(run, "policy")
    # Ray hands the bytes from one worker to the other: the driver passes on a promise of them.
    weights, others = group.promise("weights", policy.version)
    await asyncio.gather(call(worker, "load_weights", weights, policy.version), others)
