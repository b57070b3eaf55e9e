"""Recovery of a run: its column store, and the point that policy, finished steps and ledger agree on."""

import time

from infra.storage.runs import RunDirectory
from infra.storage.versions import installed_versions
from infra.stores.open import start_store
from infra.stores.steps import drop_outdated_steps
from infra.workers.launch import get_group, kill_workers
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunEvent, RunHandle
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
    drop_outdated_steps(directory, config, versions[-1] if versions else 0)


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
    directory.ledger.drop_failures()
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


def record_event(directory: RunDirectory, policy: PolicyHandle, reason: str = "") -> None:
    """Record in `metrics.jsonl` that the run is started or resumed or, for a `reason`, that its workers were restarted.

    Args:
        directory: The run.
        policy: The version from which it continues.
        reason: Why its workers were restarted by a driver that went on.
    """
    is_first = not directory.metrics.events() and not policy.step
    event = RunEvent(
        kind="restart" if reason else "start" if is_first else "resume",
        step=policy.step,
        time=time.time(),
        reason=reason,
        versions=installed_versions(),
    )
    directory.metrics.append_event(event)
