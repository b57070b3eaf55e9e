"""Approval by a person: beyond a limit, or if a saved query fails, the run pauses after a step and asks in Prefect."""

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

from prefect import get_run_logger
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows.lifecycle.cancellation import end_pause
from flows.lifecycle.outages import call_through_outages
from flows.summary import flow_run_url
from infra.monitors.rows import step_row
from infra.storage.run_files import Decision
from infra.storage.runs import RunDirectory
from schemas.errors import PipelineError, RunStoppedError
from schemas.step import FailedQuery, RunHandle, StepReport

POLL_SECONDS = 2  # between two looks for an answer


class Approval(RunInput):
    """The form that the Prefect UI shows for a paused run."""

    decision: Literal["continue", "stop", "lower the learning rate"] = Field(
        default="continue", description="How the run goes on. A stopped run can be resumed later."
    )
    learning_rate_factor: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="With 'lower the learning rate': the factor on it, for the rest of the run.",
    )


async def ask_for_approval(run: RunHandle, report: StepReport, failed: Sequence[FailedQuery] = ()) -> None:
    """If a finished step needs approval, pause until somebody decides how the run goes on.

    It does beyond a limit of `approval.when` and, with `approval.on_failed_queries`, if queries failed.
    Workers and weights stay meanwhile. The decision is written to the run directory, and a step is asked about once.

    Raises:
        RunStoppedError: The decision is to stop, or nobody answered in time.
    """
    decisions = RunDirectory.of(run).decisions
    values = step_row(report).values
    exceeded = [limit for limit in run.config.approval.when if limit.is_exceeded(values)]
    reasons = [f"{limit} ({limit.metric} is {values[limit.metric]:.4g})" for limit in exceeded]
    reasons += map(str, failed) if run.config.approval.on_failed_queries else ()
    if not reasons or report.step in decisions.load():
        return
    reason = ", ".join(reasons)
    get_run_logger().warning("paused after step %d: %s; answer at %s", report.step + 1, reason, flow_run_url())
    limit = run.config.approval.timeout_seconds
    answer = await call_through_outages(
        lambda: _ask(report, reason, limit), run.config.services.prefect_patience_seconds
    )
    lowers = answer.decision == "lower the learning rate"
    decision = Decision(
        step=report.step,
        reason=reason,
        lr_factor=answer.learning_rate_factor if lowers else 1.0,
        stops=answer.decision == "stop",
    )
    decisions.add(decision)
    if decision.stops:
        raise RunStoppedError(f"stopped on request after step {report.step + 1}: {reason}")
    get_run_logger().info("decided after step %d: %s", report.step + 1, answer.decision)


async def _ask(report: StepReport, reason: str, timeout_seconds: int) -> Approval:
    await end_pause()  # of an attempt that a lost server or a drained node has ended
    form = Approval.with_initial_data(
        description=f"After step {report.step + 1}: **{reason}**. How should the run go on?"
    )
    # The key differs in each attempt: an earlier pause with the same key would count as answered.
    key = f"step-{report.step}-{time.time_ns()}"
    try:
        return await apause_flow_run(wait_for_input=form, timeout=timeout_seconds, poll_interval=POLL_SECONDS, key=key)
    except FlowPauseTimeout:
        raise RunStoppedError(
            f"nobody decided within {timeout_seconds} s how to go on after step {report.step + 1}: {reason}"
        ) from None


async def find_failed_queries(run: RunHandle, step: int) -> tuple[FailedQuery, ...]:
    """Return the queries of `approval.queries` that say what is wrong with a finished step; none without that setting.

    They run in a thread of this process, in DuckDB's sandbox, over the newest steps. One that takes too long is itself
    what is wrong.
    """
    folder = run.config.approval.queries
    if folder is None:
        return ()
    from infra.history import sql  # not at the top: runs without queries need no DuckDB
    from infra.history.views import SANDBOX

    try:
        queries, first = sql.load_queries(folder), step + 1 - sql.CHECK_STEPS
        runs = await asyncio.to_thread(sql.RunQueries, [RunDirectory.of(run)], SANDBOX, first)
    except (PipelineError, OSError) as error:
        return (FailedQuery(name=folder, error=str(error)),)
    try:
        return tuple(await asyncio.to_thread(sql.check_step, runs, step, queries))
    finally:
        runs.stop()  # if this is cancelled
