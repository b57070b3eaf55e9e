"""Put: the rollout workers store their own rows; the driver gets one batch handle."""

from infra.stores.open import open_store
from rl_core.views import new_batch
from schemas.rollout import RolloutHandle
from schemas.step import PolicyHandle, RunHandle, StoredBatch
from tasks.columns import note_batch
from tasks.rollout import on_workers
from tasks.stage import stage


@stage("put")
async def put_columns(run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle) -> StoredBatch:
    """Let every rollout worker that has rows put them; one that lost them makes the same ones again."""
    arguments = {
        shard.shard: (policy.step, policy.version, shard.rounds, rollout.reward_parts)
        for shard in rollout.shards
        if shard.num_rows
    }
    results = await on_workers(run, policy, "put", arguments)
    batch = new_batch(
        run_id=run.run_id,
        step=policy.step,
        policy_version=policy.version,
        chunks=[result.chunk for result in results],
        dtypes=results[0].dtypes,
        prompt_lengths=rollout.prompt_lengths,
        response_lengths=rollout.response_lengths,
    )
    return note_batch(open_store(run), batch, [result.traffic for result in results])
