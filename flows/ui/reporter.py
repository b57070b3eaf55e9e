"""What a run reports of its steps: to its log and artifacts in Prefect, to its monitors, and as events.

Log lines of Sluice's packages and of workers are shown at the task run or flow run that they belong to.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefect import get_run_logger
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from flows.ui.artifacts import ProgressArtifact, show_evaluation
from flows.ui.events import RunEvents
from flows.ui.progress import eval_lines, progress_line, variance_warning
from infra.monitors import Monitors
from infra.ray.worker_logs import OWN_PACKAGES
from infra.storage.run_files import MetricsFile
from infra.storage.runs import RunDirectory
from schemas.step import EvalReport, FailedQuery, RunHandle, StepReport
from tasks.assets import checkpoints_of, trained_on
from tasks.operations import describe_checkpoint

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
        first = f"after {step} steps: held-out {report} ({report.num_prompts} prompts)"
        for line in (first, *eval_lines(report)):
            get_run_logger().info(line)
        await show_evaluation(self._run.run_id, report)
        await self._progress.show_evaluation(report)
        self._monitors.log_evaluation(report)
        self._events.complete_evaluation(report)

    async def checkpoint(self, version: int | None, evals: Sequence[EvalReport]) -> None:
        """Report the newest complete checkpoint, if there is one: as an event, and as a materialized asset."""
        if not self._events.save_checkpoint(version):
            return
        assert version is not None
        config = self._run.config
        asset = checkpoints_of(RunDirectory.of(self._run), config.checkpoint)
        await describe_checkpoint.materializing(asset, trained_on(config))(self._run, version, evals)


@contextmanager
def logs_in_prefect() -> Iterator[None]:
    """Send log lines that are written during the block, or come from a worker, to the run in whose context they are.

    Tasks and flows log by `get_run_logger()`; this is for what is below them, which knows no Prefect.
    """
    handler = APILogHandler()
    handler.addFilter(_is_of_a_run)
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _is_of_a_run(record: logging.LogRecord) -> bool:
    is_ours = record.name.partition(".")[0] in OWN_PACKAGES or hasattr(record, "worker")
    return is_ours and (TaskRunContext.get() or FlowRunContext.get()) is not None
