"""Flows in a terminal: the result of runs and pipelines, and the command that goes on with them after an early stop."""

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import typer
from prefect.exceptions import CancelledRun, TerminationSignal
from rich.console import Console

from flows.cli.report import render_summary
from flows.cli.terminal import outlived_terminal
from flows.lifecycle.session import run_flow
from flows.pipeline import pipeline
from flows.pipeline_plan import CURRENT, PipelinePlan
from flows.recovery import is_resumable, is_started
from flows.train import train
from infra.storage.driver_log import log_error
from infra.storage.runs import RunDirectory, new_run_id
from schemas.config.run import RunConfig
from schemas.config.runtime import ServicesConfig
from schemas.errors import GateError, GpuMemoryError, RunStoppedError, RunTakenOverError, UserError

TERMINATED = 128 + signal.SIGTERM
Result = TypeVar("Result")
_OF_A_GATE = {"gate.min_accuracy": "0.5", "gate.min_gain": "0", "gate.query": "'select true'"}  # what may refuse, eased


def run_training(console: Console, config: RunConfig, run_id: str | None = None) -> None:
    """Start or resume a run, and print its summary; if it stops early, say which command resumes it.

    Raises:
        Exception: The run stopped; the error's notes name the log, and the command that resumes the run.
        typer.Exit: The process was terminated.
    """
    run_id = run_id or new_run_id(config.name)
    directory = RunDirectory.at(config, run_id)
    hint = f"resume with: sluice resume {directory.argument}"

    def explain(error: BaseException, was_terminated: bool) -> str | None:
        if isinstance(error, GpuMemoryError) and error.gpu_bytes:
            error.add_note(_what_fits(config, error.gpu_bytes))
        if not is_started(directory) or isinstance(error, RunTakenOverError):
            return None
        if isinstance(error, Exception) and not was_terminated:
            log_error(directory, error)
        return hint if is_resumable(directory, error) else None

    summary = run_to_end(lambda: train(config, run_id=run_id), config.services, explain)
    console.print(render_summary(summary, directory.url))


def run_pipeline(console: Console, plan: PipelinePlan, command: str) -> None:
    """Start a pipeline or go on with it, and say what it has promoted; if it stops early, `command` continues it.

    Raises:
        Exception: It stopped; the error's notes name the command.
        typer.Exit: The process was terminated.
    """

    def explain(error: BaseException, was_terminated: bool) -> str | None:
        asked = " ".join(f"{key}={value}" for key, value in _OF_A_GATE.items() if key in str(error))
        if isinstance(error, GateError) and asked:
            return f"to promote it all the same, change what refused it, e.g. {asked}: {command}"
        return None if isinstance(error, UserError) else f"continue with: {command}"

    result = run_to_end(lambda: pipeline(plan), plan.services, explain)
    reached = "" if result.accuracy is None else f", accuracy {result.accuracy:.3f}"
    gained = "" if result.gain is None else f" ({result.gain:+.3f})"
    link = f"{plan.config.folder}/{CURRENT}"
    console.print(f"pipeline {result.pipeline_id} promoted {result.model}{reached}{gained}: {link}", soft_wrap=True)


def run_to_end(
    flow: Callable[[], Awaitable[Result]],
    services: ServicesConfig,
    explain: Callable[[BaseException, bool], str | None],
) -> Result:
    """Run a flow; if it ends early, add to the error, or print, how it is continued.

    Args:
        flow: Calls the flow.
        services: The services of its runs.
        explain: Returns the hint for an error, also told whether the process was terminated; None: there is none.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with outlived_terminal():
            return run_flow(flow, services)
    except BaseException as error:
        if isinstance(error, CancelledRun):
            error = RunStoppedError("cancelled in the Prefect UI")
        was_terminated = _was_terminated(error)
        if (hint := explain(error, was_terminated)) is not None:
            if isinstance(error, Exception) and not was_terminated:
                error.add_note(hint)
            else:
                Console(stderr=True).print(hint, markup=False, highlight=False, soft_wrap=True)
        if was_terminated:
            raise typer.Exit(TERMINATED) from None
        raise error from error.__cause__


def _what_fits(config: RunConfig, gpu_bytes: int) -> str:
    """Return what the plan says of GPUs of this size."""
    from flows.plan.resources import plan_for_gpu  # not at the top: only a run whose GPU is too small needs it

    return plan_for_gpu(config, gpu_bytes)


class _Terminated(BaseException):
    """A SIGTERM. Prefect handles the signal first, lets the flow clean up, and then sends it on to this process."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _was_terminated(error: BaseException | None) -> bool:
    """Return whether a SIGTERM caused an error, directly or as its cause or context."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # errors may cause each other
        if isinstance(error, TerminationSignal | _Terminated):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
