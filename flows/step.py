"""One GRPO step, as a flow of stages.

    driver (this flow)          workers                                 column store          ledger
    ------------------          -------                                 ------------          ------
    open the step
    rollout             ->      rollout workers generate and score                            handle of rows
    put                 ->      each puts the rows that it made      -> tokens, masks,        handle of the batch
                                                                        sampler_logprobs,
                                                                        rewards, texts
    publish (*)         ->      policy rank 0 sends the weights
    next rollout (*)    ->      rollout workers, during all below                             its handle
    logprob, reference, ->      ranks of the policy, the reference      behavior_logprobs,    handles of columns
    teacher                     and the teachers read, packed, and      reference_logprobs,
                                append their columns                 -> teacher_logprobs
    advantage                   (the driver: rewards and lengths     -> advantages            plan of the update
                                 only, and no token)
    update              ->      policy ranks read their rows, by                              version k + 1,
                                the plan; all-reduce; one version                             exactly once
    publish             ->      policy rank 0 sends version k + 1
    metrics.jsonl gets the step's line; then its columns are released

Each arrow is waited for, from top to bottom, but for what is marked (*): of an off-policy run (`max_staleness`), the
weights of version k are published before the scoring, and the next step's rollout overlaps the rest of this step.
`reference` and `teacher` run next to `logprob` if all have devices of their own. If workers share GPUs (`SharedGpus`),
they are given to the engines, to what scores, and to the update in turn, and the rollout begins with the publish.

A stage's result, a small handle, is committed to the ledger before the next one begins: a restarted driver goes on
after the last that is there. Tokens and weights pass from worker to worker.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prefect import Flow, flow, get_run_logger
from prefect.filesystems import RemoteFileSystem
from prefect.runtime import flow_run

from flows.lifecycle.cancellation import Notice, sigterm_only_told
from flows.ui.artifacts import show_samples
from infra.ray.tracing import traced_step
from infra.storage.driver_lock import holds_lock
from infra.storage.runs import RunDirectory
from infra.stores.open import open_store
from infra.stores.step_columns import archive_step, clear_step, drop_journals, open_step
from infra.workers.placement import score_together
from rl_core.rollout.responses import count_lengths
from rl_core.telemetry import packing
from rl_core.views import with_groups
from schemas.batch import BatchHandle
from schemas.config.changes import scoring_digest
from schemas.errors import RayLostError, WorkerLostError
from schemas.metrics import merge_metrics, values
from schemas.placement import GpuPhase, PhaseMemory
from schemas.rollout import RolloutHandle
from schemas.step import PolicyHandle, RunHandle, ScoredColumn, Span, StepReport
from schemas.weights import WeightsTransfer
from tasks.advantage import compute_step_advantages, update_policy
from tasks.logprob import score_behavior, score_reference, score_teachers
from tasks.operations import enter_scoring, enter_update, publish_weights
from tasks.put import put_columns
from tasks.rollout import generate_rollouts
from tasks.stage import is_committed

Result = TypeVar("Result")
SAMPLES_EVERY_STEPS = 10


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


class SharedGpus:
    """Gives the memory of shared GPUs to the next phase of a step; does nothing if workers have GPUs of their own.

    Attributes:
        memory: What moved, by the phase that was entered.
        published: The transfer of the policy's weights to the engines, before the rollout; None if there was none.
    """

    def __init__(self, run: RunHandle, policy: PolicyHandle, phase: PhaseTimer) -> None:
        self._run, self._policy, self._phase = run, policy, phase
        self.memory: dict[GpuPhase, PhaseMemory] = {}
        self.published: WeightsTransfer | None = None

    async def rollout(self) -> None:
        """Wake the engines with the policy's weights, unless the step's rows are stored already."""
        if not self._run.config.time_shares_gpus or is_committed(self._run, self._policy, "put"):
            return
        with self._phase("publish"):
            self.published, memory = await publish_weights(self._run, self._policy)
        if memory is not None:
            self.memory["rollout"] = memory

    async def scoring(self) -> None:
        """Have the engines sleep, and bring in what scores."""
        if self._run.config.time_shares_gpus:
            with self._phase("enter-scoring"):
                self.memory["scoring"] = await enter_scoring(self._run)

    async def update(self) -> None:
        """Bring in what the update needs."""
        if self._run.config.time_shares_gpus:
            with self._phase("enter-update"):
                self.memory["update"] = await enter_update(self._run)


async def score_batch(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, rollout: RolloutHandle, phase: PhaseTimer
) -> dict[str, ScoredColumn]:
    """Put the rows' log-probs under the policy, unless the update computes them, and any reference and teachers.

    All are computed at the same time where that is faster.

    Returns:
        The columns, to be added to the batch in this order, by stage. They don't depend on what ran together.
    """
    config = run.config
    passes: dict[str, Callable[[BatchHandle], Coroutine[Any, Any, ScoredColumn]]] = {}
    if config.scores_behavior:
        passes["logprob"] = lambda rows: score_behavior(run, policy, rows, rollout.pairs_apart)
    if config.kl.coef:
        passes["reference"] = lambda rows: score_reference(run, policy, rows, rollout.pairs_apart)
    if config.distillation:
        passes["teacher"] = lambda rows: score_teachers(run, policy, rows)
    scores: dict[str, ScoredColumn] = {}
    if len(passes) > 1 and score_together(config):
        # A phase is what the step waits for: `reference` only lasts for as long as the reference takes longer.
        first, *others = passes
        async with AsyncExitStack() as stack:
            tasks = {}
            for stage in others:
                tasks[stage] = await stack.enter_async_context(in_background(passes[stage](batch)))
                tasks[stage].add_done_callback(phase.background(f"{stage} scoring"))
            with phase(first):
                scores[first] = await passes[first](batch)
            for stage, task in tasks.items():
                with phase(stage):
                    scores[stage] = await task
        return scores
    for stage, score in passes.items():
        with phase(stage):
            scores[stage] = await score(with_groups(batch, [each.group for each in scores.values()]))
    return scores


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, Result]) -> AsyncIterator[asyncio.Task[Result]]:
    """Run `work` during the block, and wait until it has ended, whatever happens to the block.

    Work whose block failed is not cancelled: that would kill the workers on which it runs.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        await asyncio.gather(task, return_exceptions=True)  # cancels it if this is cancelled


def new_step_flow(
    ledger: Path | RemoteFileSystem, notice: Notice
) -> Flow[[RunHandle, PolicyHandle], Coroutine[Any, Any, StepReport]]:
    """Return the flow of a step, for the current attempt of the calling flow run.

    Prefect knows a subflow by its function's name and the number of calls before. So each attempt has a function of its
    own name: a second attempt begins at another step, and must not be given the first one's results.

    Args:
        ledger: Where the stages' results are committed. The step's own result is not persisted.
        notice: Waits for the end of a step that has its rows; before that, a SIGTERM ends it.
    """

    async def run(run: RunHandle, policy: PolicyHandle) -> StepReport:
        with sigterm_only_told():
            return await run_step(run, policy, notice)

    run.__qualname__ = f"run_step_{flow_run.run_count}"
    return flow(
        name="grpo-step",
        flow_run_name="{run.run_id}/step-{policy.step:04d}",
        persist_result=False,
        retries=0,  # whatever the user's profile says: its stages are retried
        result_storage=ledger,
        validate_parameters=False,  # they are `train`'s own; Prefect would build a pydantic model for each step
    )(run)


async def run_step(run: RunHandle, policy: PolicyHandle, notice: Notice) -> StepReport:
    """Sample from the policy, score the samples, update the policy by one version, and publish that version."""
    phase = PhaseTimer()
    try:
        with phase("open"):
            open_step(run, policy)
        with traced_step(policy.step):
            report = await _run_stages(run, policy, phase, notice)
    except BaseException as error:
        # Without a worker, or ended from outside, a step goes on from what its stages have stored, as after a kill.
        is_ended = isinstance(error, WorkerLostError | RayLostError) or not isinstance(error, Exception)
        if not (is_ended and run.config.store.is_durable) and holds_lock(RunDirectory.of(run)):
            clear_step(run, policy.step)  # and if another driver holds it, that one works on the step
        raise
    # The step is finished once this line is on disk; only then may its columns be released.
    RunDirectory.of(run).metrics.append_step(report)
    archive_step(run, policy.step)
    return report


async def _run_stages(run: RunHandle, policy: PolicyHandle, phase: PhaseTimer, notice: Notice) -> StepReport:
    traffic = {}
    gpus = SharedGpus(run, policy, phase)
    await gpus.rollout()
    with phase("rollout"):
        rollout = await generate_rollouts(run, policy, await _find_previous_rollout(run, policy))
    with phase("put"):
        stored = await put_columns(run, policy, rollout)
        if is_committed(run, policy, "put"):  # Prefect only logs that it can't write an entry
            drop_journals(run, policy.step)  # the rows are durable
        traffic["put"] = stored.traffic
    notice.hold()  # the rows are stored, and ranks that are interrupted in what follows have to be killed
    await gpus.scoring()
    published = gpus.published
    if run.config.overlaps_next_rollout(policy.step):
        with phase("publish"):
            published = (await publish_weights(run, policy)).transfer
    async with next_rollout(run, policy, rollout, phase, notice):
        scores = await score_batch(run, policy, stored.batch, rollout, phase)
        traffic |= {stage: score.traffic for stage, score in scores.items()}
        batch = with_groups(stored.batch, [score.group for score in scores.values()])
        row_kl = scores["reference"].row_kl if "reference" in scores else None
        with phase("advantage"):
            advantage = await compute_step_advantages(run, policy, batch, rollout, row_kl)
            traffic["advantage"] = advantage.traffic
        await gpus.update()
        with phase("update"):
            update = await update_policy(run, policy, advantage)
            traffic["update"] = update.traffic
    if not (run.config.runtime.max_staleness or run.config.time_shares_gpus or run.config.sft):
        with phase("publish"):
            published = (await publish_weights(run, update.policy)).transfer
    if policy.step % SAMPLES_EVERY_STEPS == 0 or policy.step == run.config.steps - 1:
        await show_samples(run, rollout)
    of_rollout = rollout.generated if run.config.sft else rollout.metrics
    metrics = merge_metrics([of_rollout, advantage.metrics, update.metrics])
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
        memory_by_phase=gpus.memory,
        started_at=phase.started_at,
        timeline=tuple(phase.spans),
        response_lengths=count_lengths(rollout.sampled.response_lengths),
        telemetry=values(merge_metrics([*measured, packing(advantage.plan)])),
        sources=rollout.sources,
    )


@asynccontextmanager
async def next_rollout(
    run: RunHandle, policy: PolicyHandle, current: RolloutHandle, phase: PhaseTimer, notice: Notice
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
            await notice.wait_unless_given(rollout)
    if not rollout.cancelled() and (error := rollout.exception()) is not None:
        get_run_logger().warning("the rollout of step %d failed and will be retried: %s", next_policy.step, error)


async def _generate_ahead(run: RunHandle, policy: PolicyHandle, current: RolloutHandle) -> RolloutHandle:
    """Generate the next step's rollouts, for which it is opened: they may store rows of the steps after it."""
    open_store(run).open(policy.step)
    return await generate_rollouts.named("next-rollout")(run, policy, current, is_new=True)


async def _find_previous_rollout(run: RunHandle, policy: PolicyHandle) -> RolloutHandle | None:
    """Return the rollout of the step before from the ledger if this step's is to continue what it left unfinished."""
    if run.config.runtime.max_staleness < 2 or not policy.step or is_committed(run, policy, "rollout"):
        return None
    before = policy.replace(version=policy.version - 1)
    if not is_committed(run, before, "rollout"):
        return None
    return await generate_rollouts.named("previous-rollout")(run, before)
