"""The train flow in a terminal: its summary, and the command that resumes it after an early stop.

A run outlives its terminal: closed pipes, hang-ups and full disks under its output don't end it.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

import typer
from prefect.exceptions import CancelledRun, TerminationSignal
from rich.console import Console

from flows.cli.report import render_summary
from flows.lifecycle.session import run_flow
from flows.train import train
from infra.storage.driver_log import log_error
from infra.storage.runs import RunDirectory, new_run_id
from schemas.config.run import RunConfig
from schemas.errors import GpuMemoryError, RunError, RunStoppedError, RunTakenOverError

TERMINATED = 128 + signal.SIGTERM
logger = logging.getLogger(__name__)


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


@contextmanager
def outlived_terminal() -> Iterator[None]:
    """Go on if nothing can be written to standard output or error any more, or if the terminal hangs up.

    What is printed from then on is lost; the log in the run's directory has it.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(sys.stdout, "standard output"), _Output(sys.stderr, "standard error")
    hung_up = signal.signal(signal.SIGHUP, _note_hangup)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, hung_up)
        sys.stdout, sys.stderr = streams


class _Output:
    """A stream of which a failure to write is a line in the log, once; then it is `/dev/null`.

    The descriptor is replaced, not only this object: other writers, and Python at its exit, would fail as well.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._is_lost = stream, name, False

    def write(self, text: str) -> int:
        """Write, if it can be; return the number of characters, as if it could."""
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, if it can be."""
        self._call(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, method: Callable[..., object], *args: str) -> None:
        if self._is_lost:
            return
        try:
            method(*args)
        except (OSError, ValueError) as error:  # the latter if it was closed
            self._is_lost = True
            _discard(self._stream)
            logger.warning("%s can't be written (%s): the run goes on, and its log has all lines", self._name, error)


def _discard(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # it has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def _note_hangup(number: int, frame: FrameType | None) -> None:
    logger.warning("the terminal has hung up: the run goes on; `sluice stop` ends it")
