"""The command that `sluice bench data-plane` runs in a process of its own."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import benchmark_session, print_report
from benchmarks.data_plane.report import plot, render
from benchmarks.data_plane.run import QUICK, Plan, measure

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions: a smoke test, not a measurement.")] = False,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw a chart: .svg or .png.")] = None,
) -> None:
    """Measure the data plane against baselines, on one reference batch."""
    with benchmark_session():
        report = measure(QUICK if quick else Plan())
    if plot_path:
        plot(report, plot_path)
    print_report(report, as_json, render)


if __name__ == "__main__":
    app()
