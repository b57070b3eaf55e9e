"""`sluice bench`: the benchmarks of a checkout, each with its own options."""

import ast
import os
import sys
from pathlib import Path

from rich.console import Console

from schemas.errors import RunError

CHECKOUT = Path(__file__).parents[2]


def run_benchmark(console: Console, name: str | None, arguments: list[str]) -> None:
    """Replace this process with a benchmark, or list the benchmarks.

    A benchmark sets environment variables that Ray and torch read on import, so it needs a fresh process. It replaces
    this one so that terminating the command terminates the benchmark.

    Args:
        console: The console to print the list on.
        name: A module or package of `benchmarks/`, with dashes or underscores; None lists them.
        arguments: The benchmark's own arguments.

    Raises:
        RunError: There are no benchmarks in this installation, or none with this name.
    """
    found = _benchmarks()
    if not found:
        raise RunError(
            f"benchmarks need a checkout and the extra `bench`: {CHECKOUT} has none; clone the repository and "
            "install it with: pip install -e '.[bench]'"
        )
    if name is None or name == "--help":
        console.print("usage: sluice bench NAME [OPTIONS]; sluice bench NAME --help shows the options of one")
        for each, title in found.items():
            console.print(f"  {each:<12} {title}", markup=False, highlight=False)
        return
    if (chosen := name.replace("_", "-")) not in found:
        raise RunError(f"there is no benchmark {name!r}; choose one of {', '.join(found)}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", f"benchmarks.{chosen.replace('-', '_')}", *arguments],
        environment,
    )


def _benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring, by benchmark name."""
    folder = CHECKOUT / "benchmarks"
    modules = {path.parent.name: path.parent / "__init__.py" for path in sorted(folder.glob("*/__main__.py"))}
    modules |= {path.stem: path for path in sorted(folder.glob("*.py")) if _has_main(path)}
    return {
        name.replace("_", "-"): (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        for name, path in sorted(modules.items())
    }


def _has_main(path: Path) -> bool:
    return "__main__" in path.read_text() and not path.name.startswith("_")
