"""Update: the only stage that changes the world."""

from infra.cluster import call, get_worker
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle, UpdateReport
from tasks.stage import stage, update_key


@stage("update", key=update_key)
async def update_policy(run: RunHandle, policy: PolicyHandle, advantage: AdvantageHandle) -> UpdateReport:
    """Apply the planned updates to the policy's version, exactly once."""
    worker = await get_worker(run, "policy")
    return await call(worker, "update", advantage.batch, advantage.plan, policy.version)
