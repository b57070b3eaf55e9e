"""The train flow in a terminal: its summary, and the command that resumes it after an early stop."""

import signal
from pathlib import Path

import typer
from prefect.exceptions import TerminationSignal
from rich.console import Console

from flows.cli.report import render_summary
from flows.cli.session import run_flow
from flows.train import train
from infra.storage.runs import RunDirectory, new_run_id
from schemas.config.run import RunConfig

TERMINATED = 128 + signal.SIGTERM


def run_training(console: Console, config: RunConfig, run_id: str | None = None, *, resume: bool = False) -> None:
    """Run the train flow and print its summary; if it stops early, print the command that resumes it.

    Raises:
        PipelineError: The run stopped.
        typer.Exit: The process was terminated.
    """
    run_id = run_id or new_run_id(config.name)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        summary = run_flow(train(config, run_id=run_id, resume=resume))
    except BaseException as error:
        directory = RunDirectory(Path(config.runtime.runs_dir) / run_id)
        if directory.path.exists():
            hint = f"resume with: sluice resume {directory.argument}"
            Console(stderr=True).print(hint, markup=False, highlight=False, soft_wrap=True)
        if _was_terminated(error):
            raise typer.Exit(TERMINATED) from None
        raise
    console.print(render_summary(summary, Path(config.runtime.runs_dir) / run_id))


class _Terminated(BaseException):
    """A SIGTERM. Prefect handles the signal first, lets the flow clean up, and then sends it on to this process."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _was_terminated(error: BaseException | None) -> bool:
    """Return whether a SIGTERM caused an error, directly or as its cause or context."""
    while error is not None and not isinstance(error, TerminationSignal | _Terminated):
        error = error.__cause__ or error.__context__
    return error is not None
