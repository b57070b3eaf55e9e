"""The publish operation: load the policy's weights into the rollout workers."""

from infra.workers.colocation import Synced
from infra.workers.generate import sync_workers
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import operation


@operation("publish")
async def publish_weights(run: RunHandle, policy: PolicyHandle) -> Synced:
    """Load the policy's version into every rollout worker, in place, unless all of them already hold it."""
    return await sync_workers(run, policy.version)
