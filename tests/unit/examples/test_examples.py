"""Every example folder: its config loads, its README names what exists, and its script runs."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flows.cli.main import app
from schemas.config.load import load_config
from tests.support.workplace import Workplace

EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/run.py"))

# Packages of optional extras that an example's script needs; without them, its run is skipped.
NEEDS = {"arithmetic": ("reasoning_gym",), "math_lora_vllm": ("vllm", "peft"), "from_verl": ("tensorboard",)}
# Interpreters of environments, which `make verifiers` makes; without them, an example's run is skipped.
INTERPRETERS = {"verifiers_env": EXAMPLES.parent / ".venv-verifiers" / "bin" / "python"}
FILES = ("README.md", "config.toml", "run.py")
OF_ANOTHER = {"verifiers_env": "guess_the_number"}  # whose curve shows what to expect


def example_id(folder: Path) -> str:
    return folder.name


every_example = pytest.mark.parametrize("folder", FOLDERS, ids=example_id)


@pytest.fixture
def example(folder: Path, workplace: Workplace) -> Iterator[Path]:
    """The example in a copy of the examples folder, whose local services are those of the workplace."""
    missing = [name for name in (*NEEDS.get(folder.name, ()), "matplotlib") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if not (python := INTERPRETERS.get(folder.name, Path(sys.executable))).exists():
        pytest.skip(f"there is no {python}")
    copy = workplace.folder / "examples"
    ignored = shutil.ignore_patterns(".sluice", "runs", "__pycache__")
    shutil.copytree(EXAMPLES, copy, ignore=ignored, dirs_exist_ok=True)
    yield copy / folder.name
    shutil.rmtree(copy)


@pytest.mark.slow
@every_example
def test_the_tiny_run(folder: Path, example: Path, workplace: Workplace) -> None:
    before = _files(example.parent)
    interpreter = ("--python", str(INTERPRETERS[folder.name])) if folder.name in INTERPRETERS else ()
    printed = workplace.python(str(example.relative_to(workplace.folder) / "run.py"), "--tiny", *interpreter)
    (metrics,) = example.glob(".sluice/runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["metrics"]["reward"] for row in rows if row["kind"] == "step"]
    assert len(rewards) == 2
    assert all(math.isfinite(reward) for reward in rewards)
    run = metrics.parent
    assert (run / "report.html").exists()
    assert (run / "summary.json").exists()
    assert list(run.glob("policy/step-000002/manifest.json"))
    assert ElementTree.parse(example / ".sluice" / "curve.svg").getroot().tag.endswith("svg")
    assert re.search(r"^\$ .*sluice (train config\.toml|demo) ", printed, re.MULTILINE)
    assert _files(example.parent) == before  # all else is in ignored folders


@every_example
def test_the_files_of_an_example(folder: Path) -> None:
    for name in FILES:
        assert (folder / name).is_file(), f"{folder.name} has no {name}"
    ElementTree.parse(folder.parent / OF_ANOTHER.get(folder.name, folder.name) / "curve.svg")
    assert "--tiny" in (folder / "run.py").read_text()


@every_example
def test_the_config_loads_and_names_existing_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(folder / "config.toml")
    monkeypatch.chdir(folder)
    for path in (config.data.train_path, config.data.eval_path):
        assert path is None or path.startswith(".sluice/") or Path(path).is_file()
    if config.reward.kind == "function":
        module, function = config.reward.path.split(":")
        assert f"def {function}(" in Path(f"{module}.py").read_text()


@every_example
def test_the_readme_names_every_file_and_nothing_else(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    files = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in files if name not in readme} == set()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert [link for link in links if not (folder / link).exists()] == []
    named = set(re.findall(r"`([\w./-]+\.(?:py|toml|jsonl|parquet|sh|svg))`", readme))
    assert [name for name in named if not _exists(folder, name)] == []


@every_example
def test_the_readme_s_commands_exist(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    assert f".venv/bin/python examples/{folder.name}/run.py" in readme
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    used = set(re.findall(r"(?:^|/|`)sluice ([a-z]+)", readme, re.MULTILINE))
    assert used <= commands
    options = set(re.findall(r"run\.py (--[a-z]+)", readme)) | set(re.findall(r"`(--[a-z]+)`", readme))
    shown = subprocess.run([sys.executable, folder / "run.py", "--help"], capture_output=True, text=True, check=True)
    assert options <= set(re.findall(r"--[a-z]+", shown.stdout))


def _exists(folder: Path, name: str) -> bool:
    """Return whether a README's file is in its folder, in the checkout, or made by the example."""
    places = (folder, folder.parent, folder.parents[1])
    return name.startswith(".sluice/") or any((place / name).exists() for place in places)


def _files(root: Path) -> dict[str, float]:
    """Return the files under a folder and their times, without those that git ignores."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in (".sluice", "__pycache__")]
        found.update({str(path): path.stat().st_mtime for name in names if (path := Path(folder) / name)})
    return found
