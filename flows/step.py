"""One GRPO step, as a flow of stages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prefect import Flow, flow, get_run_logger
from prefect.runtime import flow_run

from flows.artifacts import show_samples
from infra.ray.tracing import traced_step
from infra.storage.runs import RunDirectory
from infra.stores.open import open_store
from infra.stores.steps import archive_step, clear_step, open_step, renewed_lease
from rl_core.rollout.lengths import count_lengths
from schemas.metrics import merge_metrics, values
from schemas.step import PolicyHandle, RunHandle, Span, StepReport
from tasks.advantage import compute_step_advantages
from tasks.logprob import score_behavior, score_reference
from tasks.publish import publish_weights
from tasks.put import put_columns
from tasks.rollout import generate_rollouts
from tasks.update import update_policy

SAMPLES_EVERY_STEPS = 10


def new_step_flow(ledger: Path) -> Flow[[RunHandle, PolicyHandle], Coroutine[Any, Any, StepReport]]:
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
            open_step(run, policy.step)
        async with renewed_lease(run, policy.step):
            with traced_step(policy.step):
                report = await _run_stages(run, policy, phase)
    except BaseException:
        clear_step(run, policy.step)
        raise
    # The step is finished once this line is on disk; only then may its columns be released.
    RunDirectory.of(run).metrics.append_step(report)
    archive_step(run, policy.step)
    return report


async def _run_stages(run: RunHandle, policy: PolicyHandle, phase: "PhaseTimer") -> StepReport:
    traffic = {}
    with phase("rollout"):
        rollout = await generate_rollouts(run, policy)
    with phase("put"):
        stored = await put_columns(run, policy, rollout)
        traffic["put"] = stored.traffic
    published = None
    if run.config.is_one_step_off_policy(policy.step):
        with phase("publish"):
            published = await publish_weights(run, policy)
    async with next_rollout(run, policy, phase):
        with phase("logprob"):
            stored = await score_behavior(run, policy, stored.batch)
            traffic["logprob"] = stored.traffic
        if run.config.kl.coef:
            with phase("reference"):
                stored = await score_reference(run, policy, stored.batch)
                traffic["reference"] = stored.traffic
        with phase("advantage"):
            advantage = await compute_step_advantages(run, policy, stored.batch, rollout, stored.row_kl)
            traffic["advantage"] = advantage.traffic
        with phase("update"):
            update = await update_policy(run, policy, advantage)
            traffic["update"] = update.traffic
    if not run.config.runtime.max_staleness:
        with phase("publish"):
            published = await publish_weights(run, update.policy)
    if policy.step % SAMPLES_EVERY_STEPS == 0 or policy.step == run.config.steps - 1:
        await show_samples(run, rollout)
    metrics = merge_metrics([rollout.metrics, advantage.metrics, update.metrics])
    return StepReport(
        step=policy.step,
        policy_version=update.policy.version,
        metrics=values(metrics),
        seconds=time.perf_counter() - phase.started,
        seconds_by_phase=phase.seconds,
        store=open_store(run).usage(),
        traffic_by_stage=traffic,
        plan=advantage.plan.digest,
        publish=published,
        started_at=phase.started_at,
        timeline=tuple(phase.spans),
        response_lengths=count_lengths(rollout.response_lengths),
    )


@asynccontextmanager
async def next_rollout(run: RunHandle, policy: PolicyHandle, phase: "PhaseTimer") -> AsyncIterator[None]:
    """Generate the next step's rollouts, with the published policy, during the block if the run is one-step off-policy.

    The result is committed to the ledger, where the next step finds it. A failure does not affect this step: the next
    step tries again.
    """
    if not run.config.is_one_step_off_policy(policy.step):
        yield
        return
    next_policy = policy.replace(version=policy.version + 1)
    rollout = asyncio.create_task(generate_rollouts.with_options(task_run_name="next-rollout")(run, next_policy))
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


class PhaseTimer:
    """A timer of wall-clock seconds by phase, and of when each phase ran."""

    def __init__(self) -> None:
        self.started, self.started_at = time.perf_counter(), time.time()
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self._add_span(phase, start).seconds

    def background(self, name: str) -> Callable[[object], object]:
        """Return what is to be called when work that overlaps the phases, and begins now, is done."""
        start = time.perf_counter()
        return lambda _: self._add_span(name, start)

    def _add_span(self, name: str, start: float) -> Span:
        span = Span(name=name, start=start - self.started, seconds=time.perf_counter() - start)
        self.spans.append(span)
        return span
