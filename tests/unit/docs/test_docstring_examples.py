"""The examples in docstrings, and of the page on Sluice as a library, run and print what they say."""

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

MODULES = [
    "rl_core.advantages.estimators",
    "rl_core.columns.jagged",
    "rl_core.losses",
    "rl_core.planning.hardware",
    "rl_core.planning.plan",
    "rl_core.registry",
    "rl_core.rewards.base",
    "rl_core.rollout.responses",
    "rl_core.scoring.packing",
    "rl_core.views",
    "schemas.batch",
    "schemas.catalog",
    "schemas.config.load",
    "schemas.metric_catalog",
    "schemas.metrics",
    "schemas.step",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_library_needs_neither_ray_nor_prefect() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "library.md"
    code = (
        "import doctest, sys; result = doctest.testfile(sys.argv[1], module_relative=False); "
        "print(result.attempted > 20, result.failed, {'ray', 'prefect'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, page], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True 0 set()\n"), done.stdout
