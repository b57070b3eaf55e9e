"""The frame of the benchmarks: options from a plan, progress, errors, termination, and the report."""

import argparse
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from infra.services import LocalServices
from schemas.errors import ConfigError, PipelineError

FAILED, USER_ERROR = 1, 2
Report = dict[str, Any]  # JSON values
Plan = TypeVar("Plan")


class HasServices(Protocol):
    """A folder with local services of its own."""

    services: LocalServices


Place = TypeVar("Place", bound=HasServices)


@dataclass(frozen=True)
class Benchmark(Generic[Plan]):
    """A benchmark."""

    plan: Plan  # the default settings, a frozen dataclass of `option` fields
    quick: Plan  # the settings of a smoke test, which measures nothing of use
    measure: Callable[[Plan], Report]  # returns the report
    render: Callable[[Report], RenderableType]  # returns the report for a terminal; a text is printed as it is
    is_passed: Callable[[Report], bool] = lambda _: True  # whether the exit code is 0


def option(default: Any, text: str, **settings: Any) -> Any:
    """Return a field of a plan that is an option of the command.

    Args:
        default: A truth value, a number or text, or a tuple of these, which is comma-separated on the command line
            unless `settings` has `nargs`.
        text: The option's help.
        settings: Further arguments of argparse's `add_argument`.
    """
    return field(default=default, metadata={"help": text, **settings})


def run(benchmark: Benchmark[Any], command: str, title: str, arguments: Sequence[str]) -> None:
    """Measure as the command line says, and print the report; on SIGTERM, clean up as after an exception."""
    parser = argparse.ArgumentParser(prog=command, description=title)
    parser.add_argument("--json", action="store_true", help="print the report as JSON, on the last line")
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a measurement")
    for each in fields(benchmark.plan):
        parser.add_argument(f"--{each.name.replace('_', '-')}", **_argument(each.default, dict(each.metadata)))
    chosen = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    as_json, quick = chosen.pop("json"), chosen.pop("quick")
    signal.signal(signal.SIGTERM, _exit)  # so that children and services are stopped, too
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    try:
        report = benchmark.measure(replace(benchmark.quick if quick else benchmark.plan, **chosen))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if as_json:
        print(json.dumps(report))
    elif isinstance(shown := benchmark.render(report), str):
        print(shown)
    else:
        Console().print(shown)
    sys.exit(0 if benchmark.is_passed(report) else FAILED)


def require_steps(steps: int, num_warm_up: int) -> None:
    """Check that steps are left to measure after the first ones.

    Raises:
        ConfigError: There are none.
    """
    if steps <= num_warm_up:
        raise ConfigError(f"--steps {steps}: the first {num_warm_up} warm up; give at least {num_warm_up + 1}")


def choose(name: str, chosen: Iterable[str], known: Iterable[str]) -> None:
    """Check that the values of an option are known ones.

    Raises:
        ConfigError: One of them is not.
    """
    names = list(known)
    for each in chosen:
        if each not in names:
            raise ConfigError(f"--{name}: {each!r} is not one of {', '.join(names)}")


@contextmanager
def temporary_place(make: Callable[[Path], Place]) -> Iterator[Place]:
    """Make a place in a temporary folder; at the end, stop its services and delete it."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        place = make(Path(folder))
        signal.signal(signal.SIGTERM, _exit)  # or its services would be left behind
        try:
            yield place
        finally:
            place.services.stop()


def table(title: str, rows: Mapping[str, Mapping[str, object]], notes: Iterable[str] = ()) -> Group:
    """Return a table of named rows with the same columns, numbers with three digits or more, and lines of text."""
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    shown = Table("", *columns, title=title, title_justify="left")
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, row in rows.items():
        shown.add_row(Text(name), *(Text(_cell(row.get(column))) for column in columns))
    return Group(shown, Text("\n".join(notes)))


def _argument(default: Any, settings: dict[str, Any]) -> dict[str, Any]:
    if isinstance(default, bool):
        return {"action": "store_true", "default": None, **settings}
    if "nargs" in settings:
        return settings
    if isinstance(default, tuple):
        kind = type(default[0]) if default else str
        return {"type": lambda text: tuple(kind(part.strip()) for part in text.split(",")), **settings}
    return {"type": _count if isinstance(default, int) and default else type(default), **settings}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)
