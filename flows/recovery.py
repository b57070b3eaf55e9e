"""Where a run goes on: its column store, and the one point that policy, finished steps and ledger agree on."""

from infra import cluster
from infra.runs import RunDirectory
from infra.stores.ray import RayColumnStore
from schemas.config.run import RunConfig
from schemas.errors import RunError
from schemas.step import PolicyHandle, RunHandle
from tasks.clear import clear_columns
from tasks.stage import is_committed


def open_run(directory: RunDirectory, config: RunConfig) -> RunHandle:
    """The run with its column store: the one that is there, else a new one."""
    store = RayColumnStore.attach(directory.run_id)
    if store is None:
        # Workers of a lost store would go on asking it.
        cluster.kill_workers(directory.run_id, config.rollout.num_workers)
        store = RayColumnStore(directory.run_id, config.store.capacity_bytes)
    return RunHandle(
        run_id=directory.run_id,
        directory=str(directory.path),
        config=config,
        store_generation=store.generation,
    )


async def reconcile(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    """Bring the policy worker, the finished steps and the ledger to one point; returns the policy to go on with.

    The policy is one version ahead of the finished steps when its driver died between the update and the step's
    last line: the step is then run again from its ledger, and the worker answers with the update it recorded. If
    that ledger is gone, the worker is replaced by the last checkpoint.
    """
    policy = await _agree(run, directory)
    await _sweep(run, directory, policy.step)
    return policy


async def _agree(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    finished = len(directory.metrics.steps())
    policy = await _policy(run)
    if policy.version == finished + 1:
        unfinished = policy.replace(version=finished)
        if is_committed(run, unfinished, "advantage"):
            return unfinished
        cluster.kill_worker(run.run_id, "policy")
        policy = await _policy(run)
    if policy.version > finished:
        raise RunError(
            f"the policy has version {policy.version} but {directory.metrics.path} holds {finished} steps; "
            "the run directory has been changed by hand"
        )
    directory.metrics.truncate(policy.version)
    return policy


async def _sweep(run: RunHandle, directory: RunDirectory, step: int) -> None:
    """Clear what a killed driver left of every step but the one to go on with."""
    left = set(directory.ledger_steps())
    left |= {int(lease.rpartition("/")[2]) for lease in RayColumnStore(run.run_id).usage().open_leases}
    for other in sorted(left - {step}):
        await clear_columns(run, other)


async def _policy(run: RunHandle) -> PolicyHandle:
    return await cluster.call(await cluster.get_worker(run, "policy"), "start")
