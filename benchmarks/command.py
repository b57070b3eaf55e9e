"""What the benchmarks' commands share: progress, errors, termination, and printing the report."""

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType

from schemas.errors import PipelineError

USER_ERROR, TERMINATED = 2, 128 + signal.SIGTERM


@contextmanager
def benchmark_session() -> Iterator[None]:
    """Report progress on standard error, and an error in one line; on SIGTERM, clean up as after an exception."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that child processes and services end, too
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    try:
        yield
    except PipelineError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(USER_ERROR) from None


def print_report(report: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Print the report, for machines or for people."""
    if as_json:
        print(json.dumps(report))
    else:
        Console().print(render(report))
