"""Have rollout workers generate: groups of a step, or samples of held-out prompts, with the weights of one version."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from infra.ray.actors import call
from infra.weights.sync import sync_weights
from infra.workers.colocation import GetWorkers, Synced, enter_rollout
from infra.workers.launch import find_group, get_group, rollout_pool
from schemas.errors import VersionError
from schemas.rollout import PartialGroups, RolloutShard, SourceSchedule
from schemas.step import EvalShard, PolicyHandle, RunHandle
from schemas.weights import WeightsTransfer


async def sync_workers(run: RunHandle, version: int) -> Synced:
    """Load a policy version into every rollout worker, in place; it is then their turn if workers take turns.

    Supervised fine-tuning has none.
    """
    if run.config.sft is not None:
        return Synced(None)
    return await _sync(run, version, rollout_pool(run).get_all)


async def generate_shard(
    run: RunHandle,
    policy: PolicyHandle,
    shard: int,
    groups: Sequence[int],
    begun: Sequence[PartialGroups],
    schedules: Mapping[int, SourceSchedule],
    worker: Any,
) -> RolloutShard:
    """Have a worker generate and score these groups of the policy's step, and keep their rows until they are put."""
    version = run.config.sampler_version(policy.step)
    return await _call(run, version, worker, "generate", policy.step, version, shard, groups, begun, schedules)


async def evaluate_shard(run: RunHandle, policy: PolicyHandle, rows: Sequence[int], worker: Any) -> EvalShard:
    """Have a worker generate and score the policy's samples of these held-out prompts."""
    return await _call(run, policy.version, worker, "evaluate", policy.version, rows)


async def _call(run: RunHandle, version: int, worker: Any, method: str, *args: Any) -> Any:
    """Call a method that samples with a policy version; load that into the worker first if it lacks it."""
    try:
        return await call(worker, method, *args)
    except VersionError:  # it was started again since the others were synced

        async def this_worker() -> Sequence[Any]:
            return [worker]

        await _sync(run, version, this_worker)
        return await call(worker, method, *args)


async def _sync(run: RunHandle, version: int, get_workers: GetWorkers) -> Synced:
    policy = partial(find_group, run, "policy"), partial(get_group, run, "policy")

    async def sync(workers: Sequence[Any]) -> WeightsTransfer | None:
        return await sync_weights(run.config, version, workers, *policy)

    if run.config.time_shares_gpus:
        return await enter_rollout(run, get_workers, sync)
    return Synced(await sync(await get_workers()))
