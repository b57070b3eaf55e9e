"""The command that `sluice bench step` runs in a process of its own."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import typer

from benchmarks.busy import busy_processes
from benchmarks.command import benchmark_place, print_report
from benchmarks.step.report import render
from benchmarks.step.run import measure
from benchmarks.step.workload import PEER_PROMPTS, QUICK, Plan
from benchmarks.step.workspace import Workspace

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few steps: a smoke test.")] = False,
    model: Annotated[str | None, typer.Option(help="tiny, small or mid.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Maximum tokens per response.")] = None,
    steps: Annotated[int | None, typer.Option(min=3, help="Steps per run.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Runs per path.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="Threads of a worker; 0: as a run has them.")] = None,
    paths: Annotated[str | None, typer.Option(help="Comma-separated: synchronous, overlapped, large_chunks.")] = None,
    beside: Annotated[int | None, typer.Option(min=0, help="Busy processes beside the runs.")] = None,
    peer: Annotated[Literal["trl"] | None, typer.Option(help="Run its trainer beside synchronous steps.")] = None,
) -> None:
    """Measure whole steps: rollout and training in turn, or overlapped; or beside those of another trainer."""
    chosen: dict[str, Any] = {
        "model": model,
        "tokens": tokens,
        "steps": steps,
        "repetitions": repetitions,
        "threads": threads,
        "paths": tuple(paths.split(",")) if paths else None,
        "beside": beside,
    }
    if peer is not None:
        chosen |= {"peer": peer, "paths": ("synchronous",), "num_prompts": None if quick else PEER_PROMPTS}
    plan = replace(QUICK if quick else Plan(), **{name: value for name, value in chosen.items() if value is not None})
    with benchmark_place(Workspace) as workspace, busy_processes(plan.beside):
        report = measure(plan, workspace)
    print_report(report, as_json, render)


if __name__ == "__main__":
    app()
