"""The operations of a run, repeated by a resumed one: workers, weights, shared memory, evaluation, checkpoints."""

import logging
import time
from collections.abc import Sequence
from functools import partial

from infra.ray.actors import call
from infra.ray.ranks import WorkerGroup
from infra.storage.driver_lock import finish_in_thread, holds_lock, require_lock
from infra.storage.runs import RunDirectory
from infra.stores.step_columns import sweep_steps
from infra.workers import colocation
from infra.workers.generate import evaluate_shard, sync_workers
from infra.workers.launch import find_group, get_group, get_worker, rollout_pool, start_workers
from rl_core.rollout.evaluation import split_prompts, summarize, summarize_held_out
from schemas.errors import CheckpointError
from schemas.placement import PhaseMemory, WorkerPlace
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.assets import checkpoints_of, describe, describe_evaluation
from tasks.stage import operation

logger = logging.getLogger(__name__)


@operation("checkpoint")
async def save_checkpoint(
    run: RunHandle, policy: PolicyHandle, evals: Sequence[EvalReport], wait: bool = False
) -> int | None:
    """Start to save the policy's version, once the previous checkpoint is complete; return the newest complete version.

    Args:
        run: The run.
        policy: The version to save.
        evals: The reports of all versions evaluated so far: the best version's checkpoint may be kept.
        wait: Whether to wait until this checkpoint is complete, too.

    Raises:
        CheckpointError: This checkpoint or the previous one could not be written.
        VersionError: The policy's workers hold another version.
        RunTakenOverError: Another driver has taken over the run.
    """
    return await _save(run, await get_group(run, "policy"), policy, evals, wait)


@operation("checkpoint-complete")
async def describe_checkpoint(run: RunHandle, version: int, evals: Sequence[EvalReport]) -> None:
    """Give the materialized asset of the run's checkpoints the newest one's step, files and accuracy."""
    from infra.checkpoints.store import open_checkpoints  # not at the top: torch is imported with it

    directory = RunDirectory.of(run)
    found: dict[str, object] = {"run_id": run.run_id, "step": version}
    for report in evals:
        if report.policy_version == version:
            found["accuracy"] = report.accuracy
    try:
        manifest = open_checkpoints(directory, run.config.checkpoint).read_manifest(version)
        found |= {"bytes": sum(file.num_bytes for file in manifest.files.values()), "digest": manifest.digest}
    except (CheckpointError, OSError) as error:  # it is only shown
        logger.warning("the asset of checkpoint %d lacks its size and digest: %s", version, error)
    describe(checkpoints_of(directory, run.config.checkpoint), found)


async def save_on_failure(run: RunHandle, policy: PolicyHandle, evals: Sequence[EvalReport]) -> int | None:
    """Save the policy's version if its workers still exist and hold it; return the newest complete one, or None.

    It is no task: Prefect starts none in a flow run that is ending.
    """
    group = find_group(run, "policy")
    if group is None or not holds_lock(RunDirectory.of(run)):
        return None
    return await _save(run, group, policy, evals, wait=True)


async def _save(
    run: RunHandle, group: WorkerGroup, policy: PolicyHandle, evals: Sequence[EvalReport], wait: bool
) -> int | None:
    require_lock(RunDirectory.of(run))
    if run.config.time_shares_gpus:  # an evaluation may have been before
        await colocation.enter_update(run)
    await group.call("save", policy.version)
    if wait:
        await group.call("finish_saving")
    return await drop_superseded(run, group, evals)


async def drop_superseded(run: RunHandle, policy: WorkerGroup, evals: Sequence[EvalReport]) -> int | None:
    """Drop old checkpoints, and the columns and ledger entries of steps that a complete checkpoint includes.

    Returns:
        The newest complete version; None if there is none.
    """
    complete = await call(policy.ranks[0], "retain", evals)
    if complete is not None:
        await finish_in_thread(partial(sweep_steps, run, complete))  # its requests may be many
    return complete


@operation("enter-scoring")
async def enter_scoring(run: RunHandle) -> PhaseMemory:
    """Have the engines sleep, and bring the weights of policy and reference into memory."""
    return await colocation.enter_scoring(run)


@operation("enter-update")
async def enter_update(run: RunHandle) -> PhaseMemory:
    """Move the reference out, and bring all of the policy into memory."""
    return await colocation.enter_update(run)


@operation("evaluate")
async def evaluate_policy(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    """Evaluate the policy on the held-out prompts, whose batches are dispatched to all rollout workers.

    The report is the same for any number of workers, whether or not one dies. In supervised fine-tuning, the policy's
    ranks score the held-out rows.

    Raises:
        RewardFailureError: More rewards failed than the config allows.
    """
    report = await (_sample_held_out if run.config.sft is None else _score_held_out)(run, policy)
    describe_evaluation(RunDirectory.of(run), report)
    return report


async def _sample_held_out(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    await sync_workers(run, policy.version)
    pool, started = rollout_pool(run), time.perf_counter()
    batches = split_prompts(run.config.eval, await call(await get_worker(run, "rollout"), "num_held_out"))
    jobs = {batch: partial(evaluate_shard, run, policy, rows) for batch, rows in batches.items()}
    return summarize(run.config, policy.version, await pool.dispatch(jobs), time.perf_counter() - started)


async def _score_held_out(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    group, started = await get_group(run, "policy"), time.perf_counter()
    plan = await call(group.ranks[0], "plan_held_out", len(group.ranks))
    parts = await group.call("score_held_out", plan, policy.version)
    return summarize_held_out(policy.version, len(plan.rows), parts, time.perf_counter() - started)


@operation("publish")
async def publish_weights(run: RunHandle, policy: PolicyHandle) -> colocation.Synced:
    """Load the policy's version into every rollout worker, in place, unless all of them already hold it."""
    return await sync_workers(run, policy.version)


@operation("start-workers")
async def start_all_workers(run: RunHandle) -> list[WorkerPlace]:
    """Start the policy's and the reference's ranks and the rollout workers in parallel; keep existing ones."""
    return await start_workers(run)
