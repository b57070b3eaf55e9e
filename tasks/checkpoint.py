"""Checkpoints: the policy's ranks write what they hold; what is no longer needed goes."""

from infra.cluster import call
from infra.group import WorkerGroup, find_group, get_group
from infra.runs import RunDirectory
from schemas.step import PolicyHandle, RunHandle
from tasks.columns import sweep_columns
from tasks.stage import operation


@operation("checkpoint")
async def save_checkpoint(run: RunHandle, policy: PolicyHandle, wait: bool = False) -> None:
    """Begin to save the policy's version; the checkpoint that was begun before is complete then.

    Args:
        run: The run.
        policy: What to save.
        wait: Whether to go on only when this one is complete, too.

    Raises:
        CheckpointError: One of the two could not be written.
        VersionError: The policy's workers hold another version.
    """
    await _save(run, await get_group(run, "policy"), policy, wait)


@operation("checkpoint")
async def save_what_is_left(run: RunHandle, policy: PolicyHandle) -> None:
    """Save the policy's version if its workers are there and hold it, and wait until that is complete."""
    group = find_group(run, "policy")
    if group is not None:
        await _save(run, group, policy, wait=True)


async def _save(run: RunHandle, group: WorkerGroup, policy: PolicyHandle, wait: bool) -> None:
    await group.call("save", policy.version)
    if wait:
        await group.call("finish_saving")
    await sweep(run, group)


async def sweep(run: RunHandle, policy: WorkerGroup) -> None:
    """Drop old checkpoints, and the columns and ledger entries of steps that a complete one has taken in."""
    complete = await call(policy.ranks[0], "retain", RunDirectory.of(run).metrics.evals())
    if complete is not None:
        await sweep_columns(run, complete)
