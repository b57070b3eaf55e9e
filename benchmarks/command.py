"""Shared parts of the benchmark commands: progress, errors, termination, and printing the report."""

import json
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import typer
from rich.console import Console, RenderableType

from infra.services import LocalServices
from schemas.errors import PipelineError

USER_ERROR, TERMINATED = 2, 128 + signal.SIGTERM


class HasServices(Protocol):
    """A folder with local services of its own."""

    services: LocalServices


Place = TypeVar("Place", bound=HasServices)


@contextmanager
def benchmark_session() -> Iterator[None]:
    """Log progress to standard error and print errors on one line; on SIGTERM, clean up as after an exception."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that children and services are stopped, too
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    try:
        yield
    except PipelineError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(USER_ERROR) from None


@contextmanager
def benchmark_place(make: Callable[[Path], Place]) -> Iterator[Place]:
    """Make a place in a temporary folder, within a benchmark session; at the end, stop its services and delete it."""
    with benchmark_session(), tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        place = make(Path(folder))
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # or its services would be left behind
        try:
            yield place
        finally:
            place.services.stop()


def print_report(report: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Print the report, as JSON or as `render` formats it."""
    if as_json:
        print(json.dumps(report))
    else:
        Console().print(render(report))


def print_table(title: str, lines: dict[str, dict[str, float]], title_width: int, figure_width: int) -> None:
    """Print one line per entry, with its figures in columns of these widths, in characters."""
    names = next(iter(lines.values()))
    print(f"{title:{title_width}}", *(f"{name:>{figure_width}}" for name in names))
    for label, figures in lines.items():
        print(f"{label:{title_width}}", *(f"{value:>{figure_width}}" for value in figures.values()))
