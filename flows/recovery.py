"""Where a run resumes: its column store, and the one point that policy, finished steps and ledger agree on."""

from prefect import get_run_logger

from infra.checkpoints import open_checkpoints
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
    """If an older Sluice wrote the run's ledger, drop the steps that no checkpoint includes: they are run again.

    Raises:
        RunError: A newer Sluice wrote it.
    """
    if not directory.ledger.is_outdated():
        return
    kill_workers(directory.run_id, config)  # they run the old code, and may be ahead of the checkpoint
    versions = open_checkpoints(directory, config.checkpoint).complete_versions()
    drop_outdated_steps(directory, config, versions[-1] if versions else 0, get_run_logger())


def open_run(directory: RunDirectory, config: RunConfig) -> RunHandle:
    """Return the run with its column store: the existing one, else a new one."""
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
    """Bring the policy worker, the finished steps and the ledger to one point; return the policy to resume with.

    The policy is one version ahead of the finished steps if its driver died between the update and the step's line in
    `metrics.jsonl`: the step is then run again from its ledger, and the worker answers with the update that it
    recorded. If that ledger is gone, the worker is replaced by one with the newest checkpoint.
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
            f"the policy has version {policy.version} but {directory.metrics.path} holds {finished} steps; "
            "the run directory has been changed by hand"
        )
    directory.metrics.truncate(policy.version)
    return policy


async def _get_policy(run: RunHandle) -> PolicyHandle:
    group = await get_group(run, "policy")
    return (await group.call("handle"))[0]
