"""`sluice bench`: the benchmarks of a checkout, each with its own options."""

import os
import sys
from pathlib import Path

from schemas.errors import RunError

CHECKOUT = Path(__file__).parents[2]


def run_benchmark(arguments: list[str]) -> None:
    """Replace this process with `python -m benchmarks`; without arguments, it lists the benchmarks.

    A benchmark sets environment variables that Ray and torch read on import, so it needs a fresh process. It replaces
    this one so that terminating the command terminates the benchmark.

    Raises:
        RunError: There are no benchmarks in this installation.
    """
    if not (CHECKOUT / "benchmarks").exists():
        raise RunError(
            f"benchmarks need a checkout and the extra `bench`: {CHECKOUT} has none; clone the repository and "
            "install it with: pip install -e '.[bench]'"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "benchmarks", *(arguments or ["--help"])], environment)
