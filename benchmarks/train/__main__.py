"""The command; `sluice bench train` runs it in a process of its own."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported; see tests/conftest.py

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import benchmark_session, print_report
from benchmarks.train.report import plot, render
from benchmarks.train.run import QUICK, Plan, measure

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, the last one.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model, one fill: a smoke test, no measurement.")
    ] = False,
    models: Annotated[str | None, typer.Option(help="Comma-separated: small, mid, qwen3-0.6b, ...")] = None,
    fills: Annotated[str | None, typer.Option(help="Comma-separated shares of real tokens, such as 0.1,0.5.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Comma-separated numbers of real tokens of a batch.")] = None,
    longest: Annotated[int | None, typer.Option(min=8, help="Tokens of the longest row.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=8, help="Most positions of one forward.")] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Of each case, at least; medians are reported.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="Of torch; 0 for all cores.")] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="The GPU's, dense, for the utilisation.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw a chart: .svg or .png.")] = None,
) -> None:
    """Measure log-probs and gradients of uneven rows: packed, padded, row by row, and rows of equal lengths."""
    chosen: dict[str, Any] = {
        "models": _values("--models", models, str),
        "fills": _values("--fills", fills, float),
        "tokens": _values("--tokens", tokens, int),
        "longest": longest,
        "token_budget": token_budget,
        "repetitions": repetitions,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "peak_tflops": peak_tflops,
    }
    plan = replace(QUICK if quick else Plan(), **{name: value for name, value in chosen.items() if value is not None})
    with benchmark_session():
        report = measure(plan)
    if plot_path:
        plot(report, plot_path)
    print_report(report, as_json, render)


def _values(option: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    """The values of an option that takes several; None where it isn't given."""
    try:
        return None if text is None else tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} isn't numbers with commas between them", param_hint=option) from None


if __name__ == "__main__":
    app()
