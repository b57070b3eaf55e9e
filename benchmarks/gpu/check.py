"""The checks, and the process that each of them runs in: `python -m benchmarks.gpu.check NAME SETTINGS FOLDER`."""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.results import CheckResult, Settings

MODELS, TWIN_MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"), ("tiny",)
TWIN_LIMIT_SECONDS = 900
DEMO = "benchmarks.gpu.demo"


class Check(NamedTuple):
    """A module with a function `check(settings, folder, **options)`, and the seconds after which it is ended.

    On a GPU, the seconds of all checks are 21 minutes, which leaves four of 25 for the installation.
    """

    module: str
    limit_seconds: float
    options: Mapping[str, str] = {}

    @property
    def needs_vllm(self) -> bool:
        """Whether it needs vLLM on a GPU."""
        return self.module == DEMO

    def run(self, settings: Settings, folder: Path) -> CheckResult:
        """Run the check in this process."""
        result: CheckResult = import_module(self.module).check(settings, folder, **self.options)
        return result


def all_checks(settings: Settings) -> dict[str, Check]:
    """Return the checks by name, in order."""
    models = TWIN_MODELS if settings.is_twin else MODELS
    checks = {
        "kernels": Check("benchmarks.gpu.kernels", 90),
        **{f"speed {name}": Check("benchmarks.gpu.speed", 150, {"model": name}) for name in models},
        "memory": Check("benchmarks.gpu.memory", 150),
        "demo colocated": Check(DEMO, 285, {"placement": "colocated"}),
        "demo separate": Check(DEMO, 285, {"placement": "separate"}),
    }
    if settings.is_twin:  # its machine may have other work
        return {name: check._replace(limit_seconds=TWIN_LIMIT_SECONDS) for name, check in checks.items()}
    return checks


def result_path(folder: Path, name: str) -> Path:
    """Return the file that a check's process writes its result to."""
    return folder / f"{name.replace(' ', '-')}.json"


def main() -> None:
    """Run one check, and write its result; an error is left to end the process."""
    name, settings, folder = sys.argv[1], Settings.model_validate_json(sys.argv[2]), Path(sys.argv[3])
    result = all_checks(settings)[name].run(settings, folder)
    result_path(folder, name).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
