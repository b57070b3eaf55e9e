"""The publish operation: load the policy's weights into the rollout workers."""

import asyncio
from functools import partial

from infra.weights.sync import sync_weights
from infra.workers.launch import get_group, get_worker
from schemas.step import PolicyHandle, RunHandle
from schemas.weights import WeightsTransfer
from tasks.stage import operation


@operation("publish")
async def publish_weights(run: RunHandle, policy: PolicyHandle) -> WeightsTransfer | None:
    """Load the policy's version into every rollout worker, in place; return None if all of them already hold it."""
    numbers = range(run.config.rollout.num_workers)
    workers = await asyncio.gather(*(get_worker(run, "rollout", number) for number in numbers))
    return await sync_weights(run.config, policy.version, workers, partial(get_group, run, "policy"))
