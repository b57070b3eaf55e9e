"""The checkpoint operations: save the policy, and drop the data that a newer checkpoint supersedes."""

from infra.ray.actors import call
from infra.ray.group import WorkerGroup
from infra.storage.driver_lock import holds_lock, require_lock
from infra.storage.runs import RunDirectory
from infra.stores.steps import sweep_steps
from infra.workers.colocation import enter_update
from infra.workers.launch import find_group, get_group
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import operation


@operation("checkpoint")
async def save_checkpoint(run: RunHandle, policy: PolicyHandle, wait: bool = False) -> int | None:
    """Start to save the policy's version, once the previous checkpoint is complete; return the newest complete version.

    Args:
        run: The run.
        policy: The version to save.
        wait: Whether to wait until this checkpoint is complete, too.

    Raises:
        CheckpointError: This checkpoint or the previous one could not be written.
        VersionError: The policy's workers hold another version.
        RunTakenOverError: Another driver has taken over the run.
    """
    return await _save(run, await get_group(run, "policy"), policy, wait)


async def save_on_failure(run: RunHandle, policy: PolicyHandle) -> None:
    """Save the policy's version if its workers still exist and hold it, and wait until the checkpoint is complete.

    It is no task: Prefect starts none in a flow run that is ending.
    """
    group = find_group(run, "policy")
    if group is not None and holds_lock(RunDirectory.of(run)):
        await _save(run, group, policy, wait=True)


async def _save(run: RunHandle, group: WorkerGroup, policy: PolicyHandle, wait: bool) -> int | None:
    require_lock(RunDirectory.of(run))
    if run.config.takes_turns:  # an evaluation may have been before
        await enter_update(run)
    await group.call("save", policy.version)
    if wait:
        await group.call("finish_saving")
    return await drop_superseded(run, group)


async def drop_superseded(run: RunHandle, policy: WorkerGroup) -> int | None:
    """Drop old checkpoints, and the columns and ledger entries of steps that a complete checkpoint includes.

    Returns:
        The newest complete version; None if there is none.
    """
    complete = await call(policy.ranks[0], "retain", RunDirectory.of(run).metrics.evals())
    if complete is not None:
        sweep_steps(run, complete)
    return complete
