"""Recovery of a run: its column store, and the point that policy, finished steps and ledger agree on."""

import logging
import time
from contextlib import suppress

from infra.storage.identity import identity_of, owns_place
from infra.storage.runs import RunDirectory, installed_versions, resumed_config
from infra.stores.open import close_store, start_store
from infra.stores.step_columns import close_other_steps, drop_outdated_steps, drop_steps
from infra.workers.generate import sync_workers
from infra.workers.inputs import record_inputs, with_date
from infra.workers.launch import get_group, kill_workers
from schemas.config.run import RunConfig
from schemas.errors import RunError, RunTakenOverError, StoreError, WorkerLostError
from schemas.placement import Device
from schemas.step import PolicyHandle, RunEvent, RunHandle
from tasks.operations import drop_superseded
from tasks.stage import is_committed

logger = logging.getLogger(__name__)


def find_or_create_run(config: RunConfig, run_id: str) -> RunDirectory:
    """Return the run of that id in the config's folder of runs; make it if it doesn't exist.

    A new run records what it is given: data files, modules and, if a chat template has it, the date.

    Raises:
        UserError: The tokenizer or a data file of a new run can't be read.
    """
    directory = RunDirectory.at(config, run_id)
    if directory.exists:
        return directory
    config = with_date(config)
    record_inputs(directory, config)  # first: without `config.json`, the directory is not a run yet
    return RunDirectory.create(config, run_id)


def is_started(directory: RunDirectory) -> bool:
    """Return whether there is a run, as far as its directory can be reached."""
    try:
        return directory.exists
    except RunError:
        return False


def is_resumable(directory: RunDirectory, error: BaseException) -> bool:
    """Return whether a run that an error has stopped can be resumed as it is.

    It can't be if there is none yet, if another driver has it, or if the error says what must be done first.
    """
    return is_started(directory) and not isinstance(error, RunError | RunTakenOverError)


def change_config(directory: RunDirectory, config: RunConfig) -> RunConfig:
    """Make `config` the run's, and end what was started with the one before; return it, see `resumed_config`.

    The run's workers are started again, and its column store if that has other settings. Checkpoints are copied to
    another `checkpoint.url`. Columns aren't moved: with another place for them, unfinished steps are run again.

    Raises:
        RunError: With `config`, the run would train something else than before, or lose columns that it reuses.
        CheckpointError: The checkpoints can't be copied.
    """
    before, config = directory.config(), resumed_config(directory, config)
    if config == before:
        return config
    _check_columns_place(before, config, directory.run_id)
    kill_workers(identity_of(directory), before)
    _warn_of_idle_workers(config)
    if _columns_place(before) != _columns_place(config):
        _drop_columns(directory, before)
    if _store_settings(before) != _store_settings(config):
        close_store(directory, before)
    if before.checkpoint.url != config.checkpoint.url:
        from infra.checkpoints import open_checkpoints  # not at the top: torch is imported with it

        source, target = (open_checkpoints(directory, of.checkpoint) for of in (before, config))
        logger.info("copied checkpoints %s from %s to %s", target.copy_from(source), source, target)
    directory.write_config(config)
    return config


def drop_outdated_ledger(directory: RunDirectory, config: RunConfig) -> None:
    """Drop the steps that no checkpoint includes if an older Sluice wrote the run's ledger; they are run again.

    Raises:
        RunError: A newer Sluice wrote the ledger.
    """
    if not directory.ledger.is_outdated():
        return
    from infra.checkpoints import open_checkpoints  # not at the top: torch is imported with it

    kill_workers(identity_of(directory), config)  # they run the old code, and may be ahead of the checkpoint
    versions = open_checkpoints(directory, config.checkpoint).complete_versions()
    drop_outdated_steps(directory, config, versions[-1] if versions else 0)


def open_run(directory: RunDirectory, config: RunConfig) -> RunHandle:
    """Open the run's column store, or start a new one if it is gone, and return the run's handle."""
    store, is_new = start_store(directory, config)
    if is_new:
        kill_workers(identity_of(directory), config)  # they are clients of the lost store
    return RunHandle(
        run_id=directory.run_id,
        identity=identity_of(directory),
        directory=directory.url,
        config=config,
        store_incarnation=store.incarnation,
    )


async def reconcile(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    """Bring the policy worker, the finished steps and the ledger into agreement; return the policy to resume from.

    The policy is one version ahead of the finished steps if the driver died between the update and the step's line in
    `metrics.jsonl`. The step is then run again from its ledger, and the worker returns the update that it recorded. If
    the ledger's entries are gone, the worker is replaced by one that loads the newest checkpoint.

    Other steps that are still open are closed. All rollout workers get the version that samples next in one transfer.
    """
    directory.ledger.drop_failures()
    policy = await _find_policy(run, directory)
    await drop_superseded(run, await get_group(run, "policy"), directory.metrics.evals())
    close_other_steps(run, policy.step)
    if not is_committed(run, policy, "rollout"):
        with suppress(WorkerLostError):  # a lost worker is created again, and synced, when it gets a job
            await sync_workers(run, run.config.sampler_version(policy.step))
    return policy


async def _find_policy(run: RunHandle, directory: RunDirectory) -> PolicyHandle:
    finished = directory.metrics.num_steps()
    policy = await _get_policy(run)
    is_planned = is_committed(run, policy.replace(version=finished), "advantage")
    step = resumed_step(finished, policy.version, is_planned)
    if step is None and policy.version == finished + 1:
        (await get_group(run, "policy")).kill()
        policy = await _get_policy(run)
        step = resumed_step(finished, policy.version, is_planned)
    if step is None:
        raise RunError(
            f"the policy has version {policy.version}, but {directory.metrics} has {finished} steps, as lines of it "
            f"were lost: restore that file, or save the weights with `sluice export {directory.argument} FOLDER`, and "
            "start a new run with model.path=FOLDER"
        )
    directory.metrics.truncate(step)
    return policy.replace(version=step)


def resumed_step(num_finished: int, version: int, is_planned: bool) -> int | None:
    """Return the step from which a run goes on.

    Args:
        num_finished: Steps that have a line in `metrics.jsonl`.
        version: The policy's version, which is the number of its updates.
        is_planned: Whether the ledger holds all of step `num_finished` that an update needs.

    Returns:
        The policy's own step; later ones, which it doesn't know, are run again. If it is one update ahead, the step
        whose update it has recorded. None if it is ahead of what the run has recorded: it must be loaded again.
    """
    if version <= num_finished:
        return version
    return num_finished if version == num_finished + 1 and is_planned else None


async def _get_policy(run: RunHandle) -> PolicyHandle:
    group = await get_group(run, "policy")
    return (await group.call("handle"))[0]


def record_event(directory: RunDirectory, policy: PolicyHandle, device: Device, reason: str = "") -> None:
    """Record in `metrics.jsonl` that the run is started or resumed or, for a `reason`, that its workers were restarted.

    Args:
        directory: The run.
        policy: The version from which it continues.
        device: What its workers compute on.
        reason: Why its workers were restarted by a driver that went on.
    """
    from infra.engines.open import engine_versions  # not at the top: torch is imported with it

    is_first = not directory.metrics.events() and not policy.step
    event = RunEvent(
        kind="restart" if reason else "start" if is_first else "resume",
        step=policy.step,
        time=time.time(),
        reason=reason,
        versions=installed_versions() | engine_versions(directory.config().rollout),
        device=device,
    )
    directory.metrics.append_event(event)


def _drop_columns(directory: RunDirectory, config: RunConfig) -> None:
    try:
        if (url := getattr(config.store, "url", None)) and not owns_place(directory, url):
            return
        drop_steps(directory, config)
    except (StoreError, OSError, ImportError, ValueError) as error:
        logger.warning("the columns of run %s can't be removed from their old place: %s", directory.run_id, error)


def _check_columns_place(before: RunConfig, config: RunConfig, run_id: str) -> None:
    if config.steps_kept_for_reuse and _columns_place(before) != _columns_place(config):
        raise RunError(
            f"run {run_id} takes groups of its stored steps (data.reuse.max_age), which aren't moved to another store; "
            "leave store.kind and store.url as they were"
        )


def _columns_place(config: RunConfig) -> tuple[object, ...]:
    return config.store.is_durable, getattr(config.store, "url", None)


def _store_settings(config: RunConfig) -> tuple[object, ...]:
    services = config.services
    return config.store, config.runtime.shared_memory, services.tls_certificate, services.tls_key


def _warn_of_idle_workers(config: RunConfig) -> None:
    rollout = config.rollout
    num_batches = -(-rollout.num_prompts // rollout.prompts_per_batch)
    if num_batches < rollout.num_workers:
        logger.warning(
            "rollout.batch_prompts = %d makes %d batches of %d prompts, so only as many of the %d rollout workers have "
            "work; lower it to %d to use them all (samples then differ by rounding)",
            rollout.prompts_per_batch,
            num_batches,
            rollout.num_prompts,
            rollout.num_workers,
            -(-rollout.num_prompts // rollout.num_workers),
        )
