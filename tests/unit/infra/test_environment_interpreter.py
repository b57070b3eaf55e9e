"""Environments in the interpreter of another virtual environment, which has neither Sluice nor any other package."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.datasets.environments import schemas_of_tools
from infra.environments.interpreter import OLDEST, find_interpreter
from infra.environments.open import environment_class
from infra.environments.pool import EnvironmentPool
from infra.environments.slot import MODULES
from schemas.config.environment import ToolsEnvironment
from schemas.config.rollout import TransformersRollout
from schemas.errors import ConfigError, EnvironmentImportError
from tests.support.environment_pools import open_rows, opened, step_rows

GAME = """
import importlib.util, json, os, sys
from rl_core.environments.base import Step

class Game:
    def __init__(self, task, seed, only_there=""):
        self.count = seed
    async def reset(self):
        import only_there
        packages = [name for name in ("numpy", "pydantic", "ray", "prefect") if importlib.util.find_spec(name)]
        return json.dumps([sys.prefix, packages, only_there.__file__, os.environ.get("PYTHONPATH"), sys.path[-1]])
    def step(self, action):
        self.count += int(action)
        return Step(str(self.count), 0.5, self.count > 6, {"said": 1})
"""
TOOL = '''
import sys

def prefix(ending: str) -> str:
    """Tell where Python is.

    Args:
        ending: What follows.
    """
    return sys.prefix + ending
'''


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an empty virtual environment with one module of its own."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("")
    return folder


@pytest.fixture
def python(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put modules of a user, and no checkout of Sluice, on the module path; return the venv's interpreter."""
    (tmp_path / "far_game.py").write_text(GAME)
    (tmp_path / "far_tool.py").write_text(TOOL)
    root = str(Path(__file__).parents[3])
    others = [entry for entry in sys.path if str(Path(entry).resolve()) != root]
    monkeypatch.setattr(sys, "path", [*others, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", root)
    return str(venv / "bin" / "python")


def test_an_environment_runs_in_an_interpreter_with_nothing_but_the_standard_library(
    python: str, venv: Path, tmp_path: Path
) -> None:
    with opened("far_game:Game", python=python) as pool:
        replies = open_rows(pool, *"abc")
        (observation,) = replies[0].observations
        prefix, packages, module, module_path, last = json.loads(observation)
        assert (prefix, packages, module_path, last) == (str(venv), [], None, str(tmp_path))
        assert Path(module).is_relative_to(venv)
        replies = step_rows(pool, ["1", "five", "5"])
        assert [replies[row].observations for row in (0, 2)] == [("1",), ("7",)]
        assert [replies[row].done for row in (0, 2)] == [False, True]
        assert replies[1].failure is not None
        assert replies[1].failure.message.startswith("ValueError: invalid literal")
        assert (replies[2].reward, replies[2].metrics) == (0.5, {"said": 1})


def test_tools_run_in_another_interpreter(python: str, venv: Path) -> None:
    config = ToolsEnvironment(tools=("far_tool:prefix",), parser="json", python=python, num_processes=1)
    (schema,) = schemas_of_tools(config)
    assert schema["function"]["name"] == "prefix"
    pool = EnvironmentPool(environment_class(config, TransformersRollout()))
    pool.start()
    open_rows(pool, "")
    reply = step_rows(pool, ['{"name": "prefix", "arguments": {"ending": "!"}}'])[0]
    pool.close()
    assert reply.observations == (f"{venv}!",)
    assert reply.metrics["tool_errors"] == 0


def test_a_module_that_is_missing_there_is_named_with_the_interpreter(python: str, venv: Path, tmp_path: Path) -> None:
    (tmp_path / "far_arrays.py").write_text("import numpy\n")
    message = rf"importing 'far_arrays' raised ModuleNotFoundError: No module named 'numpy'.* installed for {python}\?"
    with opened("far_arrays:Game", python=python) as pool, pytest.raises(EnvironmentImportError, match=message):
        pool.wait_until_ready()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"can't be run: No such file or directory; set it to the program of a Python of at least 3\.10"),
        ("echo 3.9", r"is Python 3\.9, which is too old; set it"),
        ("echo no such library >&2; exit 3", "is no Python that works: no such library; set it"),
        ("exit 4", "is no Python that works: exit code 4; set it"),
        ("exec sleep 600", "can't be run: no answer within 0.25 s"),
    ],
)
def test_an_interpreter_that_does_not_work_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, message: str
) -> None:
    if "sleep" in (script or ""):
        monkeypatch.setattr("infra.environments.interpreter.CHECK_SECONDS", 0.25)
    program = tmp_path / "python"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(ConfigError, match=message) as raised, opened("Counting", python=str(program)):
        pass
    assert "\n" not in str(raised.value)
    assert f"environment.python {str(program)!r} on " in str(raised.value)


def test_what_runs_there_has_the_syntax_of_the_oldest_version() -> None:
    root = Path(__file__).parents[3]
    modules = [Path(str(module.__file__)) for module in MODULES]
    for file in (*modules, *root.glob("rl_core/environments/*.py")):
        ast.parse(file.read_text(), feature_version=OLDEST)


def test_a_program_is_also_found_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python-elsewhere").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(tmp_path))
    find_interpreter("python-elsewhere").check()
