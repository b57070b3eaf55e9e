"""`sluice bench`: measurements against peers. They live beside the tests, so they need a checkout."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import RunError

CHECKOUT = Path(__file__).parents[1]
DATA_PLANE = "tests.benchmarks.data_plane"

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
    switches = [name for name, is_on in {"--json": as_json, "--quick": quick}.items() if is_on]
    _run(DATA_PLANE, [*switches, *(["--plot", str(plot.resolve())] if plot else [])])


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
