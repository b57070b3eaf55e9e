"""The command that `sluice bench chaos` runs in a process of its own."""

from typing import Annotated

import typer

from benchmarks.chaos.report import render
from benchmarks.chaos.run import is_passed, measure
from benchmarks.command import benchmark_place, print_report
from tests.support.workplace import Workplace

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    kills: Annotated[int, typer.Option(min=1, help="Faults.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults and their moments.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
) -> None:
    """Disturb real runs at random moments, resume them, and compare them with an undisturbed run.

    The exit code is 1 if a run ended otherwise than the undisturbed one, left something over or printed a traceback.
    """
    with benchmark_place(Workplace) as place:
        report = measure(place, kills, seed)
    print_report(report, as_json, render)
    if not is_passed(report):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
