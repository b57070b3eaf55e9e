"""The command that `sluice bench orchestration` runs in a process of its own."""

from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.command import benchmark_place, print_report
from benchmarks.orchestration.report import render
from benchmarks.orchestration.run import QUICK, Plan, measure
from benchmarks.step.workspace import Workspace

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the run, e.g. store.kind=shared", metavar="[KEY=VALUE]...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few steps: a smoke test.")] = False,
    steps: Annotated[int | None, typer.Option(min=3, help="Steps of the run.")] = None,
) -> None:
    """Measure what a step takes beside rollout, scoring and update, in a real run with a tiny model."""
    plan = replace(QUICK if quick else Plan(), overrides=tuple(overrides or ()))
    plan = replace(plan, steps=steps or plan.steps)
    with benchmark_place(Workspace) as workspace:
        report = measure(plan, workspace)
    print_report(report, as_json, render)


if __name__ == "__main__":
    app()
