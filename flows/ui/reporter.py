"""What a run reports of its steps: to its log and artifacts in Prefect, to its monitors, and as events."""

from collections.abc import Sequence

from prefect import get_run_logger

from flows.ui.artifacts import ProgressArtifact, show_evaluation
from flows.ui.events import RunEvents
from flows.ui.progress import eval_lines, progress_line, variance_warning
from infra.monitors import Monitors
from infra.storage.run_files import MetricsFile
from schemas.step import EvalReport, FailedQuery, RunHandle, StepReport

FIRST_STEPS = 3  # after which a run whose groups have no variance says so


class RunReporter:
    """The reports of one run.

    Args:
        run: The run.
        progress: Its progress artifact.
        monitors: Its monitors.
        events: Its events.
        metrics: Its finished steps.
    """

    def __init__(
        self, run: RunHandle, progress: ProgressArtifact, monitors: Monitors, events: RunEvents, metrics: MetricsFile
    ) -> None:
        self._run, self._progress, self._monitors, self._events = run, progress, monitors, events
        self._metrics = metrics

    async def step(self, report: StepReport) -> None:
        """Report a finished step."""
        get_run_logger().info(progress_line(report, self._run.config.steps))
        await self._progress.show_step(report)
        self._monitors.log_step(report)
        self._events.complete_step(report)
        is_last_of_first = report.step + 1 == min(FIRST_STEPS, self._run.config.steps)
        if is_last_of_first and (warning := variance_warning(self._metrics.steps(), self._run.run_id)) is not None:
            get_run_logger().warning(warning)

    def queries(self, report: StepReport, failed: Sequence[FailedQuery]) -> None:
        """Report the saved queries that a finished step has failed."""
        for query in failed:
            get_run_logger().warning("step %d: %s", report.policy_version, query)
            self._events.fail_query(report.policy_version, query)

    async def evaluation(self, report: EvalReport) -> None:
        """Report an evaluation."""
        step = report.policy_version
        first = f"held-out accuracy after {step} steps: {report.accuracy:.3f} ({report.num_prompts} prompts)"
        for line in (first, *eval_lines(report)):
            get_run_logger().info(line)
        await show_evaluation(self._run.run_id, report)
        await self._progress.show_evaluation(report)
        self._monitors.log_evaluation(report)
        self._events.complete_evaluation(report)

    def checkpoint(self, version: int | None) -> None:
        """Report the newest complete checkpoint, if there is one."""
        self._events.save_checkpoint(version)
