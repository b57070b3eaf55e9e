"""One GRPO step, as a flow of stages."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prefect import Flow, flow, get_run_logger
from prefect.filesystems import RemoteFileSystem
from prefect.runtime import flow_run

from flows.artifacts import show_samples
from flows.colocation import Turns
from flows.phases import PhaseTimer
from flows.scoring import score_batch
from infra.ray.tracing import traced_step
from infra.storage.driver_lock import holds_lock
from infra.storage.runs import RunDirectory
from infra.stores.open import open_store
from infra.stores.steps import archive_step, clear_step, drop_journals, open_step, renewed_lease
from rl_core.rollout.lengths import count_lengths
from rl_core.telemetry import packing
from rl_core.views import with_groups
from schemas.config.changes import scoring_digest
from schemas.metrics import merge_metrics, values
from schemas.rollout import RolloutHandle
from schemas.step import PolicyHandle, RunHandle, StepReport
from tasks.advantage import compute_step_advantages
from tasks.operations import publish_weights
from tasks.put import put_columns
from tasks.rollout import generate_rollouts
from tasks.stage import is_committed
from tasks.update import update_policy

SAMPLES_EVERY_STEPS = 10


def new_step_flow(ledger: Path | RemoteFileSystem) -> Flow[[RunHandle, PolicyHandle], Coroutine[Any, Any, StepReport]]:
    """Return the flow of a step, for the current attempt of the calling flow run.

    Prefect knows a subflow by its function's name and the number of calls before. So each attempt has a function of its
    own name: a second attempt begins at another step, and must not be given the first one's results.

    Args:
        ledger: Where the stages' results are committed. The step's own result is not persisted.
    """

    async def run(run: RunHandle, policy: PolicyHandle) -> StepReport:
        return await run_step(run, policy)

    run.__qualname__ = f"run_step_{flow_run.run_count}"
    return flow(
        name="grpo-step",
        flow_run_name="{run.run_id}/step-{policy.step:04d}",
        persist_result=False,
        result_storage=ledger,
        validate_parameters=False,  # they are `train`'s own; Prefect would build a pydantic model for each step
    )(run)


async def run_step(run: RunHandle, policy: PolicyHandle) -> StepReport:
    """Sample from the policy, score the samples, update the policy by one version, and publish that version."""
    phase = PhaseTimer()
    try:
        with phase("lease"):
            open_step(run, policy)
        async with renewed_lease(run, policy.step):
            with traced_step(policy.step):
                report = await _run_stages(run, policy, phase)
    except BaseException:
        if holds_lock(RunDirectory.of(run)):  # else another driver works on the step
            clear_step(run, policy.step)
        raise
    # The step is finished once this line is on disk; only then may its columns be released.
    RunDirectory.of(run).metrics.append_step(report)
    archive_step(run, policy.step)
    return report


async def _run_stages(run: RunHandle, policy: PolicyHandle, phase: PhaseTimer) -> StepReport:
    traffic = {}
    turns = Turns(run, policy, phase)
    await turns.rollout()
    with phase("rollout"):
        rollout = await generate_rollouts(run, policy, await _find_previous_rollout(run, policy))
    with phase("put"):
        stored = await put_columns(run, policy, rollout)
        drop_journals(run, policy.step)  # the rows are durable
        traffic["put"] = stored.traffic
    await turns.scoring()
    published = turns.published
    if run.config.overlaps_next_rollout(policy.step):
        with phase("publish"):
            published = (await publish_weights(run, policy)).transfer
    async with next_rollout(run, policy, rollout, phase):
        scores = await score_batch(run, policy, stored.batch, phase)
        traffic |= {stage: score.traffic for stage, score in scores.items()}
        batch = with_groups(stored.batch, [score.group for score in scores.values()])
        row_kl = scores["reference"].row_kl if "reference" in scores else None
        with phase("advantage"):
            advantage = await compute_step_advantages(run, policy, batch, rollout, row_kl)
            traffic["advantage"] = advantage.traffic
        await turns.update()
        with phase("update"):
            update = await update_policy(run, policy, advantage)
            traffic["update"] = update.traffic
    if not run.config.runtime.max_staleness and not run.config.takes_turns:
        with phase("publish"):
            published = (await publish_weights(run, update.policy)).transfer
    if policy.step % SAMPLES_EVERY_STEPS == 0 or policy.step == run.config.steps - 1:
        await show_samples(run, rollout)
    metrics = merge_metrics([rollout.metrics, advantage.metrics, update.metrics])
    measured = [rollout.telemetry, *(score.telemetry for score in scores.values()), update.telemetry]
    return StepReport(
        step=policy.step,
        policy_version=update.policy.version,
        metrics=values(metrics),
        seconds=time.perf_counter() - phase.started,
        seconds_by_phase=phase.seconds,
        store=open_store(run).usage(),
        traffic_by_stage=traffic,
        plan=advantage.plan.digest,
        config=scoring_digest(run.config),
        publish=published,
        memory_by_phase=turns.memory,
        started_at=phase.started_at,
        timeline=tuple(phase.spans),
        response_lengths=count_lengths(rollout.sampled.response_lengths),
        telemetry=values(merge_metrics([*measured, packing(advantage.plan)])),
        sources=rollout.sources,
    )


@asynccontextmanager
async def next_rollout(
    run: RunHandle, policy: PolicyHandle, current: RolloutHandle, phase: PhaseTimer
) -> AsyncIterator[None]:
    """Generate the next step's rollouts, with the published policy, during the block if the run is off-policy.

    What `current` has left unfinished is continued. The result is committed to the ledger, where the next step finds
    it. A failure does not affect this step: the next step tries again.
    """
    if not run.config.overlaps_next_rollout(policy.step):
        yield
        return
    next_policy = policy.replace(version=policy.version + 1)
    rollout = asyncio.create_task(_generate_ahead(run, next_policy, current))
    rollout.add_done_callback(phase.background("rollout of the next step"))
    try:
        yield
    except BaseException:
        rollout.cancel()
        raise
    finally:
        with phase("next-rollout"):
            await asyncio.wait([rollout])
    if not rollout.cancelled() and (error := rollout.exception()) is not None:
        get_run_logger().warning("the rollout of step %d failed and will be retried: %s", next_policy.step, error)


async def _generate_ahead(run: RunHandle, policy: PolicyHandle, current: RolloutHandle) -> RolloutHandle:
    """Generate the next step's rollouts under its lease: they may store rows of the steps after it."""
    open_store(run).open_lease(policy.step)
    async with renewed_lease(run, policy.step):
        return await generate_rollouts.named("next-rollout")(run, policy, current)


async def _find_previous_rollout(run: RunHandle, policy: PolicyHandle) -> RolloutHandle | None:
    """Return the rollout of the step before from the ledger if this step's is to continue what it left unfinished."""
    if run.config.runtime.max_staleness < 2 or not policy.step or is_committed(run, policy, "rollout"):
        return None
    before = policy.replace(version=policy.version - 1)
    if not is_committed(run, before, "rollout"):
        return None
    return await generate_rollouts.named("previous-rollout")(run, before)
