"""The command that `sluice bench train` runs in a process of its own."""

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
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model, one fill: a smoke test, not a measurement.")
    ] = False,
    models: Annotated[str | None, typer.Option(help="Comma-separated: small, mid, qwen3-0.6b, ...")] = None,
    fills: Annotated[
        str | None, typer.Option(help="Comma-separated fractions of real tokens, such as 0.1,0.5.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Comma-separated numbers of real tokens per batch.")] = None,
    longest: Annotated[int | None, typer.Option(min=8, help="Tokens of the longest row.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=8, help="Maximum positions per forward.")] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Minimum repetitions per case; medians are reported.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights: float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="torch threads; 0 for all cores.")] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="The GPU's dense peak, for the utilization (MFU).")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw a chart: .svg or .png.")] = None,
) -> None:
    """Measure log-probs and gradients of uneven rows (packed, padded, row by row) and of rows of equal lengths."""
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
    """Parse a comma-separated option; return None if it isn't given."""
    try:
        return None if text is None else tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a comma-separated list of numbers", param_hint=option) from None


if __name__ == "__main__":
    app()
