"""The command that `sluice bench gpu` runs in a process of its own."""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.command import benchmark_session
from benchmarks.gpu.check import Check, all_checks
from benchmarks.gpu.report import markdown, render
from benchmarks.gpu.results import Settings
from benchmarks.gpu.run import run_checks
from schemas.errors import ConfigError

GPU_TFLOPS, TWIN_TFLOPS = 989.0, 1.0

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, on the last line.")] = False,
    twin: Annotated[bool, typer.Option("--twin", help="Run the same checks on the CPU, with tiny sizes.")] = False,
    peak_tflops: Annotated[
        float | None,
        typer.Option(help="Dense bfloat16 peak, for the utilization (MFU); default: 989, an H100's or H200's."),
    ] = None,
    checks: Annotated[str | None, typer.Option(help="Comma-separated names of checks; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for gpu.json and gpu.md.")] = Path(),
) -> None:
    """Run the GPU checklist, and write gpu.json and gpu.md; the exit code is 1 if a check failed."""
    with benchmark_session(), tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        device = "cpu" if twin else "cuda"
        if not twin and not torch.cuda.is_available():
            raise ConfigError(
                "torch finds no CUDA device on this machine; run the checklist on one that has a GPU, or run its twin "
                "on the CPU with --twin"
            )
        settings = Settings(device=device, peak_tflops=peak_tflops or (TWIN_TFLOPS if twin else GPU_TFLOPS))
        report = run_checks(settings, _choose(all_checks(settings), checks), Path(folder))
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(report.model_dump_json(indent=2) + "\n")
    (out / "gpu.md").write_text(markdown(report))
    if as_json:
        print(report.model_dump_json())
    else:
        Console().print(render(report))
    if not report.is_passed:
        raise typer.Exit(1)


def _choose(found: dict[str, Check], names: str | None) -> dict[str, Check]:
    """Return the checks of these names.

    Raises:
        ConfigError: There is none of one of these names.
    """
    chosen = list(found) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in found]:
        raise ConfigError(f"--checks: {unknown[0]!r} is not one of {', '.join(found)}")
    return {name: found[name] for name in chosen}


if __name__ == "__main__":
    app()
