"""Recovery of a run: its column store, and the point that policy, finished steps and ledger agree on."""

from prefect import get_run_logger

from infra.storage.runs import RunDirectory
from infra.stores.open import start_store
from infra.stores.steps import drop_outdated_steps
from infra.workers.launch import get_group, kill_workers
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle
from tasks.checkpoint import drop_superseded
from tasks.stage import is_committed


def drop_outdated_ledger(directory: RunDirectory, config: RunConfig) -> None:
    """Drop the steps that no checkpoint includes if an older Sluice wrote the run's ledger; they are run again.

    Raises:
        RunError: A newer Sluice wrote the ledger.
    """
    if not directory.ledger.is_outdated():
        return
    from infra.checkpoints import open_checkpoints  # not at the top: torch is imported with it

    kill_workers(directory.run_id, config)  # they run the old code, and may be ahead of the checkpoint
    versions = open_checkpoints(directory, config.checkpoint).complete_versions()
    drop_outdated_steps(directory, config, versions[-1] if versions else 0, get_run_logger())


def open_run(directory: RunDirectory, config: RunConfig) -> RunHandle:
    """Open the run's column store, or start a new one if it is gone, and return the run's handle."""
    store, is_new = start_store(directory, config)
    if is_new:
        kill_workers(directory.run_id, config)  # they are clients of the lost store
    return RunHandle(
        run_id=directory.run_id,
        directory=str(directory.path),
        config=config,
        store_incarnation=store.incarnation,
    )


async def reconcile(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    """Bring the policy worker, the finished steps and the ledger into agreement; return the policy to resume from.

    The policy is one version ahead of the finished steps if the driver died between the update and the step's line in
    `metrics.jsonl`. The step is then run again from its ledger, and the worker returns the update that it recorded. If
    the ledger's entries are gone, the worker is replaced by one that loads the newest checkpoint.
    """
    policy = await _find_policy(run, directory)
    await drop_superseded(run, await get_group(run, "policy"))
    return policy


async def _find_policy(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    finished = len(directory.metrics.steps())
    policy = await _get_policy(run)
    if policy.version == finished + 1:
        unfinished = policy.replace(version=finished)
        if is_committed(run, unfinished, "advantage"):
            return unfinished
        (await get_group(run, "policy")).kill()
        policy = await _get_policy(run)
    if policy.version > finished:
        raise RunError(
            f"the policy has version {policy.version}, but {directory.metrics.path} has {finished} steps: the run "
            "directory was edited by hand; restore that file"
        )
    directory.metrics.truncate(policy.version)
    return policy


async def _get_policy(run: RunHandle) -> PolicyHandle:
    group = await get_group(run, "policy")
    return (await group.call("handle"))[0]
