"""Where a run goes on: its column store, and the one point that policy, finished steps and ledger agree on."""

from infra.storage.runs import RunDirectory
from infra.stores.open import start_store
from infra.workers.launch import get_group, kill_workers
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle
from tasks.checkpoint import drop_superseded
from tasks.stage import is_committed


def open_run(directory: RunDirectory, config: RunConfig) -> RunHandle:
    """The run with its column store: the one that is there, else a new one."""
    store, is_new = start_store(directory, config)
    if is_new:
        # Workers of a lost store would go on asking it.
        kill_workers(directory.run_id, config)
    return RunHandle(
        run_id=directory.run_id,
        directory=str(directory.path),
        config=config,
        store_incarnation=store.incarnation,
    )


async def reconcile(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    """Bring the policy worker, the finished steps and the ledger to one point; returns the policy to go on with.

    The policy is one version ahead of the finished steps when its driver died between the update and the step's
    last line: the step is then run again from its ledger, and the worker answers with the update it recorded. If
    that ledger is gone, the worker is replaced by the last checkpoint.
    """
    policy = await _agree(run, directory)
    await drop_superseded(run, await get_group(run, "policy"))
    return policy


async def _agree(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    finished = len(directory.metrics.steps())
    policy = await _policy(run)
    if policy.version == finished + 1:
        unfinished = policy.replace(version=finished)
        if is_committed(run, unfinished, "advantage"):
            return unfinished
        (await get_group(run, "policy")).kill()
        policy = await _policy(run)
    if policy.version > finished:
        raise RunError(
            f"the policy has version {policy.version} but {directory.metrics.path} holds {finished} steps; "
            "the run directory has been changed by hand"
        )
    directory.metrics.truncate(policy.version)
    return policy


async def _policy(run: RunHandle) -> PolicyHandle:
    group = await get_group(run, "policy")
    return (await group.call("handle"))[0]
