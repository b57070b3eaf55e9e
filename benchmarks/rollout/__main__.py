"""The command that `sluice bench rollout` runs in a process of its own."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from benchmarks.command import benchmark_session, print_report
from benchmarks.rollout.report import render
from benchmarks.rollout.run import QUICK, Plan, measure

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few tokens: a smoke test.")] = False,
    models: Annotated[str | None, typer.Option(help="Comma-separated: tiny, small, mid.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per batch.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per prompt.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Maximum tokens per response.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Repetitions per path; medians are reported.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="torch threads; 0 for all cores.")] = None,
    paths: Annotated[str | None, typer.Option(help="Comma-separated: sluice, generate, vllm, ...")] = None,
) -> None:
    """Generate the same workload with each engine in turn: responses of equal and of varied lengths."""
    chosen: dict[str, Any] = {
        "models": tuple(models.split(",")) if models is not None else None,
        "prompts": prompts,
        "samples": samples,
        "tokens": tokens,
        "repetitions": repetitions,
        "threads": threads,
        "paths": tuple(paths.split(",")) if paths is not None else None,
    }
    plan = replace(QUICK if quick else Plan(), **{name: value for name, value in chosen.items() if value is not None})
    with benchmark_session():
        report = measure(plan)
    print_report(report, as_json, render)


if __name__ == "__main__":
    app()
