"""The train flow in a terminal: its summary, and the command that resumes it after an early stop."""

import signal

import typer
from prefect.exceptions import CancelledRun, TerminationSignal
from rich.console import Console

from flows.cli.report import render_summary
from flows.cli.session import run_flow
from flows.train import train
from infra.storage.driver_log import log_error
from infra.storage.runs import RunDirectory, new_run_id
from schemas.config.run import RunConfig
from schemas.errors import RunStoppedError

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
        summary = run_flow(lambda: train(config, run_id=run_id), config.runtime)
    except BaseException as error:
        if isinstance(error, CancelledRun):
            error = RunStoppedError("cancelled in the Prefect UI")
        is_started, was_terminated = directory.path.exists(), _was_terminated(error)
        if is_started and isinstance(error, Exception) and not was_terminated:
            log_error(directory, error)
            error.add_note(hint)
        elif is_started:
            Console(stderr=True).print(hint, markup=False, highlight=False, soft_wrap=True)
        if was_terminated:
            raise typer.Exit(TERMINATED) from None
        raise error from error.__cause__
    console.print(render_summary(summary, directory.path))


class _Terminated(BaseException):
    """A SIGTERM. Prefect handles the signal first, lets the flow clean up, and then sends it on to this process."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _was_terminated(error: BaseException | None) -> bool:
    """Return whether a SIGTERM caused an error, directly or as its cause or context."""
    while error is not None and not isinstance(error, TerminationSignal | _Terminated):
        error = error.__cause__ or error.__context__
    return error is not None
