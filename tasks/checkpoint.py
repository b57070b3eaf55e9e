"""Checkpoint: the policy worker writes what it holds."""

from infra.cluster import call, get_worker
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import operation


@operation("checkpoint")
async def save_checkpoint(run: RunHandle, policy: PolicyHandle) -> str:
    """Save the policy's version; returns the checkpoint's path."""
    return await call(await get_worker(run, "policy"), "save")
