"""Put: the rollout workers store their own rows; the driver gets one batch handle."""

from infra.stores.ray import RayColumnStore
from rl_core.views import new_batch
from schemas.batch import BatchHandle
from schemas.rollout import RolloutHandle
from schemas.step import PolicyHandle, RunHandle
from tasks.rollout import on_all_workers
from tasks.stage import stage


@stage("put")
async def put_columns(run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle) -> BatchHandle:
    """Let every rollout worker put its own rows; a worker that lost them makes the same ones again."""
    RayColumnStore(run.run_id).open_lease(run.run_id, policy.step)
    results = await on_all_workers(run, policy, "put", policy.step, policy.version)
    return new_batch(
        run_id=run.run_id,
        step=policy.step,
        policy_version=policy.version,
        chunks=[result.chunk for result in results],
        dtypes=results[0].dtypes,
        prompt_lengths=rollout.prompt_lengths,
        response_lengths=rollout.response_lengths,
    )
