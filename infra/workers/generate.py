"""Have a rollout worker generate some of a step's groups."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from infra.ray.actors import call
from infra.weights.sync import sync_weights
from infra.workers.launch import get_group
from schemas.rollout import RolloutShard
from schemas.step import PolicyHandle, RunHandle


async def generate_shard(
    run: RunHandle, policy: PolicyHandle, shard: int, groups: Sequence[int], worker: Any
) -> RolloutShard:
    """Have a worker generate and score these groups of the policy's step, and keep their rows until they are put."""
    version = run.config.sampler_version(policy.step)
    await sync_weights(run.config, version, [worker], partial(get_group, run, "policy"))
    return await call(worker, "generate", policy.step, version, shard, groups)
