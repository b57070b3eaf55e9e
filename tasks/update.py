"""The update stage, the only one that changes the policy."""

from infra.storage.ledger import update_key
from infra.workers.launch import get_group
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle, UpdateReport
from tasks.stage import stage


@stage("update", key=update_key)
async def update_policy(run: RunHandle, policy: PolicyHandle, advantage: AdvantageHandle) -> UpdateReport:
    """Apply the planned updates to the policy's version, exactly once."""
    group = await get_group(run, "policy")
    report, *_ = await group.call("update", advantage.batch, advantage.plan, policy.version)
    return report  # of all ranks, from rank 0
