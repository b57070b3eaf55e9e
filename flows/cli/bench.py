"""`sluice bench`: measurements against peers. They live beside the tests, so they need a checkout."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import RunError

CHECKOUT = Path(__file__).parents[2]
DATA_PLANE = "benchmarks.data_plane"
TRAIN = "benchmarks.train"
STEP = "benchmarks.step"
ROLLOUT = "benchmarks.rollout"

app = typer.Typer(name="bench", help="Measure Sluice against its peers.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure Sluice against its peers, from a checkout with the extra `bench`."""


@app.command(name="data-plane")
def data_plane(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, the last one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions: a smoke test, no measurement.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a chart: .svg or .png.")] = None,
) -> None:
    """Put, read, permute and extend one batch, in turn with TransferQueue and padded peers."""
    _run(DATA_PLANE, _arguments(as_json, quick, {"--plot": plot.resolve() if plot else None}))


@app.command()
def train(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, the last one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model: a smoke test, no measurement.")] = False,
    models: Annotated[str | None, typer.Option(help="Comma-separated: small, mid, qwen3-0.6b, ...")] = None,
    fills: Annotated[str | None, typer.Option(help="Comma-separated shares of real tokens, such as 0.1,0.5.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Comma-separated numbers of real tokens of a batch.")] = None,
    longest: Annotated[int | None, typer.Option(help="Tokens of the longest row.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="Most positions of one forward.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="Of each measurement; medians are reported.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of torch; 0 for all cores.")] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="The GPU's, dense, for the utilisation.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a chart: .svg or .png.")] = None,
) -> None:
    """Log-probs and gradients of uneven rows: packed, padded, row by row, and rows of equal lengths."""
    options = {
        "--models": models,
        "--fills": fills,
        "--tokens": tokens,
        "--longest": longest,
        "--token-budget": token_budget,
        "--repetitions": repetitions,
        "--device": device,
        "--dtype": dtype,
        "--threads": threads,
        "--peak-tflops": peak_tflops,
        "--plot": plot.resolve() if plot else None,
    }
    _run(TRAIN, _arguments(as_json, quick, options))


@app.command()
def rollout(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, the last one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few tokens: a smoke test.")] = False,
    models: Annotated[str | None, typer.Option(help="Comma-separated: tiny, small, mid.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts of a batch.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each prompt.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the longest response.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="Of each path; medians are reported.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of torch; 0 for all cores.")] = None,
    paths: Annotated[str | None, typer.Option(help="Comma-separated: sluice, generate, vllm, ...")] = None,
) -> None:
    """Samples with log-probs from every engine in turn: responses of equal lengths, and of varied ones."""
    options = {
        "--models": models,
        "--prompts": prompts,
        "--samples": samples,
        "--tokens": tokens,
        "--repetitions": repetitions,
        "--threads": threads,
        "--paths": paths,
    }
    _run(ROLLOUT, _arguments(as_json, quick, options))


@app.command()
def step(
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON, the last one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few steps: a smoke test.")] = False,
    model: Annotated[str | None, typer.Option(help="tiny, small or mid.")] = None,
    tokens: Annotated[int | None, typer.Option(help="The most of one response.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of each run.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="Runs of each path.")] = None,
    cores: Annotated[int | None, typer.Option(help="That the workers share.")] = None,
) -> None:
    """Whole steps: sampling and training one after the other, and overlapped."""
    options = {
        "--model": model,
        "--tokens": tokens,
        "--steps": steps,
        "--repetitions": repetitions,
        "--cores": cores,
    }
    _run(STEP, _arguments(as_json, quick, options))


def _arguments(as_json: bool, quick: bool, options: Mapping[str, object]) -> list[str]:
    """What a benchmark's own command is told; options that are None aren't given."""
    switches = [name for name, is_on in {"--json": as_json, "--quick": quick}.items() if is_on]
    return [*switches, *(f"{name}={value}" for name, value in options.items() if value is not None)]


def _run(module: str, arguments: list[str]) -> None:
    """Run a benchmark in a process of its own: it sets what Ray and torch read when they are imported."""
    if not CHECKOUT.joinpath(*module.split("."), "__main__.py").is_file():
        raise RunError(
            f"{module} is not beside the package in {CHECKOUT}: benchmarks need a checkout and the extra `bench`; "
            "clone the repository and install it with: pip install -e '.[bench]'"
        )
    finished = subprocess.run([sys.executable, "-m", module, *arguments], cwd=CHECKOUT, check=False)
    if finished.returncode:
        raise typer.Exit(finished.returncode)
