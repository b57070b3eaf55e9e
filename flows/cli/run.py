"""The train flow in a terminal: its summary, and the command that resumes it after an early stop."""

import signal

import typer
from prefect.exceptions import CancelledRun, TerminationSignal
from rich.console import Console

from flows.cli.report import render_summary
from flows.cli.terminal import outlived_terminal
from flows.lifecycle.session import run_flow
from flows.train import train
from infra.storage.driver_log import log_error
from infra.storage.runs import RunDirectory, new_run_id
from schemas.config.run import RunConfig
from schemas.errors import GpuMemoryError, RunError, RunStoppedError, RunTakenOverError

TERMINATED = 128 + signal.SIGTERM


def run_training(console: Console, config: RunConfig, run_id: str | None = None) -> None:
    """Start or resume a run, and print its summary; if it stops early, say which command resumes it.

    Raises:
        Exception: The run stopped; the error's notes name the log, and the command that resumes the run.
        typer.Exit: The process was terminated.
    """
    run_id = run_id or new_run_id(config.name)
    directory = RunDirectory.at(config, run_id)
    hint = f"resume with: sluice resume {directory.argument}"
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with outlived_terminal():
            summary = run_flow(lambda: train(config, run_id=run_id), config.services)
    except BaseException as error:
        if isinstance(error, CancelledRun):
            error = RunStoppedError("cancelled in the Prefect UI")
        is_own = _is_started(directory) and not isinstance(error, RunTakenOverError)
        was_terminated = _was_terminated(error)
        if isinstance(error, GpuMemoryError) and error.gpu_bytes:
            error.add_note(_what_fits(config, error.gpu_bytes))
        if is_own and isinstance(error, Exception) and not was_terminated:
            log_error(directory, error)
            if not isinstance(error, RunError):  # it says what must be done first: resuming would meet it again
                error.add_note(hint)
        elif is_own:
            Console(stderr=True).print(hint, markup=False, highlight=False, soft_wrap=True)
        if was_terminated:
            raise typer.Exit(TERMINATED) from None
        raise error from error.__cause__
    console.print(render_summary(summary, directory.url))


def _what_fits(config: RunConfig, gpu_bytes: int) -> str:
    """Return what the plan says of GPUs of this size."""
    from flows.plan.resources import plan_for_gpu  # not at the top: only a run whose GPU is too small needs it

    return plan_for_gpu(config, gpu_bytes)


def _is_started(directory: RunDirectory) -> bool:
    """Return whether there is a run to resume, as far as its directory can be reached."""
    try:
        return directory.exists
    except RunError:
        return False


class _Terminated(BaseException):
    """A SIGTERM. Prefect handles the signal first, lets the flow clean up, and then sends it on to this process."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _was_terminated(error: BaseException | None) -> bool:
    """Return whether a SIGTERM caused an error, directly or as its cause or context."""
    while error is not None and not isinstance(error, TerminationSignal | _Terminated):
        error = error.__cause__ or error.__context__
    return error is not None
