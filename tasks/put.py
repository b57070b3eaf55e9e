"""The put stage: the rollout workers store their own rows, and the driver gets one batch handle."""

from functools import partial
from typing import Any

from infra.ray.actors import call
from infra.stores.open import open_store
from infra.stores.steps import publish_handle
from infra.workers.generate import generate_shard
from infra.workers.launch import rollout_pool
from rl_core.views import new_batch
from schemas.rollout import PutResult, RolloutHandle, RolloutShard
from schemas.step import PolicyHandle, RunHandle, StoredBatch
from tasks.stage import stage


@stage("put")
async def put_columns(run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle) -> StoredBatch:
    """Have every rollout worker put the rows that it holds; regenerate rows that were lost with a worker."""
    shards = [shard for shard in rollout.shards if shard.num_rows]
    results = await rollout_pool(run).dispatch(
        {shard.shard: partial(_put, run, policy, rollout, shard) for shard in shards},
        owners={shard.shard: shard.worker for shard in shards if shard.worker < run.config.rollout.num_workers},
    )
    batch = new_batch(
        run_id=run.run_id,
        step=policy.step,
        policy_version=rollout.policy_version,
        chunks=[result.chunk for result in results],
        dtypes=results[0].dtypes,
        prompt_lengths=rollout.prompt_lengths,
        response_lengths=rollout.response_lengths,
    )
    return publish_handle(open_store(run), batch, [result.traffic for result in results])


async def _put(
    run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle, shard: RolloutShard, worker: Any
) -> PutResult:
    if not await call(worker, "has_shard", rollout.step, rollout.policy_version, shard.shard):
        await generate_shard(run, policy, shard.shard, shard.groups, worker)
    return await call(worker, "put", rollout.step, shard.shard, shard.kept, rollout.reward_parts)
