"""A run's events in Prefect, for automations, with typed payloads.

All concern the resource `sluice.run.<run id>`. Prefect adds the flow run and its deployment as related resources, so
that an automation can act on them.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from statistics import fmean
from typing import ClassVar

from prefect.events import Event, emit_event
from pydantic import NonNegativeInt

from schemas.base import Frozen
from schemas.step import EvalReport, FailedQuery, StepReport

WINDOW_STEPS = 10  # over which rewards are averaged
COLLAPSE_FRACTION = 0.5  # of the best average so far


class EventPayload(Frozen):
    """The payload of one kind of event."""

    event: ClassVar[str]

    run_id: str
    runs_dir: str
    step: NonNegativeInt  # finished steps, which is also the policy's version


class RunStarted(EventPayload):
    """A new run's workers are ready."""

    event = "sluice.run.started"


class RunResumed(EventPayload):
    """An existing run's workers are ready, and it goes on after `step` steps."""

    event = "sluice.run.resumed"


class StepCompleted(EventPayload):
    """A step is finished."""

    event = "sluice.step.completed"

    seconds: float
    metrics: dict[str, float]


class EvaluationCompleted(EventPayload):
    """The policy was evaluated."""

    event = "sluice.eval.completed"

    accuracy: float
    accuracies: dict[str, float | None]  # by data source


class CheckpointSaved(EventPayload):
    """A checkpoint is complete; `step` is its version."""

    event = "sluice.checkpoint.saved"


class RewardFailing(EventPayload):
    """Rewards of a step failed."""

    event = "sluice.reward.failing"

    failed_fraction: float


class QueryFailed(EventPayload):
    """A saved query of `approval.queries` returned rows for a step, or could not be answered."""

    event = "sluice.query.failed"

    query: str
    num_rows: NonNegativeInt
    rows: tuple[str, ...]  # the first ones, as JSON
    error: str | None


class RewardCollapsed(EventPayload):
    """The mean reward of the last steps is less than half of the best such mean before."""

    event = "sluice.reward.collapsed"

    reward: float
    best_reward: float


class RunEnded(EventPayload):
    """The run is complete, or has stopped; no step will follow unless it is resumed."""

    event = "sluice.run.ended"

    is_complete: bool


class RunEvents:
    """The events of one run.

    An event follows that of the last finished step, or of the start. Those follow none: Prefect's server holds a
    follower back, for up to 15 minutes, until it has seen what it follows, and has forgotten that when it restarts. In
    a chain of all events, one that is lost would delay all later ones.

    Args:
        run_id: The run's id.
        runs_dir: The folder that holds the run.
        num_reported: The steps that were finished before the run was resumed. Some of them may be run again, as they
            were: what went wrong in them is not reported again, or an automation would stop the run there each time.
        checkpoint: The version of the newest checkpoint that was reported before; -1: none.
    """

    def __init__(self, run_id: str, runs_dir: str, num_reported: int = 0, checkpoint: int = -1) -> None:
        self._run = {"run_id": run_id, "runs_dir": runs_dir}
        self._resource = {"prefect.resource.id": f"sluice.run.{run_id}", "prefect.resource.name": run_id}
        self._num_reported, self._checkpoint = num_reported, checkpoint
        self._leader: Event | None = None  # that others follow
        self._rewards: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._best_reward = -inf
        self._is_collapsed = False

    def start(self, step: int) -> None:
        """Report that the run's workers are ready, after `step` finished steps."""
        self._lead((RunResumed if step else RunStarted)(**self._run, step=step))

    def recall(self, reports: Iterable[StepReport]) -> None:
        """Take up the rewards of steps that were finished before the run was resumed; they are reported already."""
        for report in reports:
            self._watch_reward(report)

    def complete_step(self, report: StepReport) -> None:
        """Report a finished step, and what its rewards show."""
        step = report.policy_version
        self._lead(StepCompleted(**self._run, step=step, seconds=report.seconds, metrics=report.metrics))
        if (fraction := report.metrics.get("reward/failed_fraction")) and step > self._num_reported:
            self._emit(RewardFailing(**self._run, step=step, failed_fraction=fraction))
        self._watch_reward(report)

    def fail_query(self, step: int, failed: FailedQuery) -> None:
        """Report what a saved query says about the newest of `step` finished steps."""
        if step <= self._num_reported:
            return
        found = failed.model_dump(include={"num_rows", "rows", "error"})
        self._emit(QueryFailed(**self._run, step=step, query=failed.name, **found))

    def complete_evaluation(self, report: EvalReport) -> None:
        """Report an evaluation."""
        accuracies = {source.data_source: source.mean_at_n for source in report.sources}
        step, accuracy = report.policy_version, report.accuracy
        self._emit(EvaluationCompleted(**self._run, step=step, accuracy=accuracy, accuracies=accuracies))

    def save_checkpoint(self, version: int | None) -> bool:
        """Report the newest complete checkpoint, once; return whether it had not been reported."""
        if version is None or version <= self._checkpoint:
            return False
        self._checkpoint = version
        self._emit(CheckpointSaved(**self._run, step=version))
        return True

    def end(self, step: int, is_complete: bool) -> None:
        """Report the end of the run, after `step` finished steps."""
        self._emit(RunEnded(**self._run, step=step, is_complete=is_complete))

    def _watch_reward(self, report: StepReport) -> None:
        step, reward = report.policy_version, report.metrics.get("reward")
        if reward is None:
            return
        self._rewards.append(reward)
        if len(self._rewards) < WINDOW_STEPS:
            return
        mean, was_collapsed = fmean(self._rewards), self._is_collapsed
        # Of rewards that were never above 0, no fraction tells a collapse.
        self._is_collapsed = self._best_reward > 0 and mean < COLLAPSE_FRACTION * self._best_reward
        if self._is_collapsed and not was_collapsed and step > self._num_reported:
            self._emit(RewardCollapsed(**self._run, step=step, reward=mean, best_reward=self._best_reward))
        self._best_reward = max(self._best_reward, mean)

    def _lead(self, payload: EventPayload) -> None:
        self._leader = None
        self._leader = self._emit(payload)

    def _emit(self, payload: EventPayload) -> Event | None:
        return emit_event(payload.event, self._resource, payload=payload.model_dump(mode="json"), follows=self._leader)
