"""What a run reports of its steps: to its log and artifacts in Prefect, to its monitors, and as events.

Log lines of Sluice's packages and of workers are shown at the task run or flow run that they belong to. The local
server keeps the pages of a run's newest steps, so that its database doesn't grow with the run.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from flows.lifecycle.outages import API_ERRORS
from flows.ui.artifacts import ProgressArtifact, show_evaluation
from flows.ui.events import RunEvents
from flows.ui.progress import eval_lines, progress_line, variance_warning
from infra.monitors import Monitors
from infra.monitors.rows import step_row
from infra.ray.worker_logs import OWN_PACKAGES
from infra.services.local import LocalServices, deletes_flow_runs
from infra.storage.run_files import MetricsFile
from infra.storage.runs import RunDirectory
from schemas.config.runtime import ServicesConfig
from schemas.step import EvalReport, FailedQuery, RunHandle, StepReport
from tasks.assets import checkpoints_of, trained_on
from tasks.operations import describe_checkpoint

FIRST_STEPS = 3  # after which a run whose groups have no variance says so
KEPT_STEPS = 1_000  # of a run, whose flow runs the local server keeps
TRIM_SECONDS = 60.0  # between two deletions of older ones
PAGE_RUNS = 50  # asked for at a time


class RunReporter:
    """The reports of one run."""

    def __init__(
        self, run: RunHandle, progress: ProgressArtifact, monitors: Monitors, events: RunEvents, metrics: MetricsFile
    ) -> None:
        self._run, self._progress, self._monitors, self._events = run, progress, monitors, events
        self._metrics = metrics
        self._limits = run.config.approval.when  # until the first step

    async def step(self, report: StepReport) -> None:
        """Report a finished step."""
        get_run_logger().info(progress_line(report, self._run.config.steps))
        await self._progress.show_step(report)
        self._monitors.log_step(report)
        self._events.complete_step(report)
        values = step_row(report).values
        for limit in self._limits:
            if limit.metric not in values:
                get_run_logger().warning(
                    "approval.when: %s: step %d has no metric %s, and a step without it doesn't pause the run",
                    *(limit, report.policy_version, limit.metric),
                )
        self._limits = ()
        if report.step + 1 == min(FIRST_STEPS, self._run.config.steps):
            warning = variance_warning(self._metrics.steps(), RunDirectory.of(self._run).argument)
            if warning is not None:
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
        config, directory = self._run.config, RunDirectory.of(self._run)
        directory.write_reported_checkpoint(version)
        asset = checkpoints_of(directory, config.checkpoint)
        await describe_checkpoint.materializing(asset, trained_on(directory, config))(self._run, version, evals)


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


@asynccontextmanager
async def newest_steps_kept(run_id: str, services: ServicesConfig) -> AsyncIterator[None]:
    """Delete the pages of a run's old steps during the block, in the background.

    Only a local server's, and unless a `PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED` of the user's own says that flow
    runs stay. Nothing is resumed from them. A failure is logged once, and costs the run nothing.
    """
    if LocalServices(Path(services.dir)).prefect_api_url != PREFECT_API_URL.value() or not deletes_flow_runs():
        yield
        return
    deleting = asyncio.create_task(_delete_old_steps_often(run_id))
    try:
        yield
    finally:
        deleting.cancel()
        await asyncio.wait([deleting])


async def _delete_old_steps_often(run_id: str) -> None:
    has_failed = False
    async with get_client() as client:
        while True:
            await asyncio.sleep(TRIM_SECONDS)
            try:
                await delete_old_steps(client, await _attempts(client, run_id), KEPT_STEPS)
            except (*API_ERRORS, ValueError) as error:  # the latter of an answer that the client can't read
                if not has_failed:
                    get_run_logger().warning("old steps can't be deleted from the Prefect server: %s", error)
                has_failed = True


async def delete_old_steps(client: PrefectClient, attempts: Sequence[UUID], num_kept: int) -> None:
    """Delete what a server has of a run's older steps: flow runs and task runs, with their states and logs.

    Args:
        client: Asks the server.
        attempts: The run's flow runs, whose subflows are its steps.
        num_kept: So many of the newest steps stay, with the checkpoints and evaluations since the oldest of them.
    """
    steps = filters.FlowRunFilter(parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=list(attempts)))
    newest_first = FlowRunSort.START_TIME_DESC
    old = await client.read_flow_runs(flow_run_filter=steps, sort=newest_first, offset=num_kept, limit=1)
    if not old or (last := old[0].start_time) is None:
        return
    steps.start_time = filters.FlowRunFilterStartTime(before_=last)
    while runs := await client.read_flow_runs(flow_run_filter=steps, limit=PAGE_RUNS):
        for step in runs:
            with suppress(ObjectNotFound):  # somebody else has deleted it
                await client.delete_flow_run(step.id)
    tasks = filters.TaskRunFilter(
        flow_run_id=filters.TaskRunFilterFlowRunId(any_=list(attempts)),
        start_time=filters.TaskRunFilterStartTime(before_=last),
        state=filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=list(TERMINAL_STATES)), name=None),
    )
    while found := await client.read_task_runs(task_run_filter=tasks, limit=PAGE_RUNS):
        for task in found:
            with suppress(ObjectNotFound):
                await client.delete_task_run(task.id)


async def _attempts(client: PrefectClient, run_id: str) -> list[UUID]:
    """Return the flow runs of a run: the current one, and those before that have its name."""
    flow = filters.FlowFilter(name=filters.FlowFilterName(any_=["train"]))
    named = filters.FlowRunFilter(name=filters.FlowRunFilterName(any_=[run_id]))
    return [
        UUID(flow_run.id),
        *(each.id for each in await client.read_flow_runs(flow_filter=flow, flow_run_filter=named)),
    ]


def _is_of_a_run(record: logging.LogRecord) -> bool:
    is_ours = record.name.partition(".")[0] in OWN_PACKAGES or hasattr(record, "worker")
    return is_ours and (TaskRunContext.get() or FlowRunContext.get()) is not None
