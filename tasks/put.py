"""Put: the rollout workers store their own rows; the driver gets one batch handle."""

from functools import partial
from typing import Any

from infra.cluster import call
from infra.stores.open import open_store
from rl_core.views import new_batch
from schemas.rollout import PutResult, RolloutHandle, RolloutShard
from schemas.step import PolicyHandle, RunHandle, StoredBatch
from tasks.columns import note_batch
from tasks.rollout import generate_shard
from tasks.stage import stage
from tasks.workers import deal


@stage("put")
async def put_columns(run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle) -> StoredBatch:
    """Let every rollout worker put the rows that it holds; of those that are lost, the same ones are made again."""
    shards = [shard for shard in rollout.shards if shard.num_rows]
    results = await deal(
        run,
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
    return note_batch(open_store(run), batch, [result.traffic for result in results])


async def _put(
    run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle, shard: RolloutShard, worker: Any
) -> PutResult:
    if not await call(worker, "holds", rollout.step, rollout.policy_version, shard.shard):
        await generate_shard(run, policy, shard.shard, shard.groups, worker)
    return await call(worker, "put", rollout.step, shard.shard, shard.kept, rollout.reward_parts)
