"""One GRPO step, as a flow of stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import flow

from infra.runs import RunDirectory
from schemas.metrics import merge_metrics, values
from schemas.rollout import RolloutHandle
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle, StepReport, UpdateReport
from tasks.advantage import compute_step_advantages
from tasks.artifacts import show_samples
from tasks.clear import clear_columns
from tasks.logprob import score_behavior, score_reference
from tasks.publish import publish_weights
from tasks.put import put_columns
from tasks.rollout import generate_rollouts
from tasks.update import update_policy

SAMPLES_EVERY_STEPS = 10


# The step's own result is never persisted: a resumed run would match it by call order, not by step.
@flow(name="grpo-step", flow_run_name="{run.run_id}/step-{policy.step:04d}", persist_result=False)
async def run_step(run: RunHandle, policy: PolicyHandle) -> StepReport:
    """Sample with the policy, score, update it by one version, and publish that version."""
    phase = PhaseTimer()
    try:
        with phase("rollout"):
            rollout = await generate_rollouts(run, policy)
        with phase("put"):
            batch = await put_columns(run, policy, rollout)
        with phase("logprob"):
            batch = await score_behavior(run, policy, batch)
        if run.config.loss.kl_coef:
            with phase("reference"):
                batch = await score_reference(run, policy, batch)
        with phase("advantage"):
            advantage = await compute_step_advantages(run, policy, batch, rollout)
        with phase("update"):
            update = await update_policy(run, policy, advantage)
        with phase("publish"):
            await publish_weights(run, update.policy)
        if policy.step % SAMPLES_EVERY_STEPS == 0 or policy.step == run.config.steps - 1:
            await show_samples(run, rollout)
        report = _report(policy, rollout, advantage, update, phase)
        # The step is done when this line is on disk; only then may its columns go.
        RunDirectory(Path(run.directory)).metrics.append_step(report)
        return report
    finally:
        await clear_columns(run, policy.step)


class PhaseTimer:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start


def _report(
    policy: PolicyHandle,
    rollout: RolloutHandle,
    advantage: AdvantageHandle,
    update: UpdateReport,
    phase: PhaseTimer,
) -> StepReport:
    metrics = merge_metrics([*(shard.metrics for shard in rollout.shards), advantage.metrics, update.metrics])
    return StepReport(
        step=policy.step,
        policy_version=update.policy.version,
        metrics=values(metrics),
        seconds=time.perf_counter() - phase.started,
        seconds_by_phase=phase.seconds,
    )
