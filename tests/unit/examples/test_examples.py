"""Every example folder: its config loads, and its README names what exists."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from flows.cli.main import app
from schemas.config.load import load_config

EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/run.py"))

FILES = ("README.md", "config.toml", "run.py")
OF_ANOTHER = dict.fromkeys(("any_agent", "verifiers_env"), "guess_the_number")  # whose curve shows what to expect


def example_id(folder: Path) -> str:
    return folder.name


every_example = pytest.mark.parametrize("folder", FOLDERS, ids=example_id)


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
    used = set(re.findall(r"(?:^|/|`)sluice ([a-z]+)", readme, re.MULTILINE))
    assert used <= set(typer.main.get_command(app).commands)
    options = set(re.findall(r"run\.py (--[a-z]+)", readme)) | set(re.findall(r"`(--[a-z]+)`", readme))
    shown = subprocess.run([sys.executable, folder / "run.py", "--help"], capture_output=True, text=True, check=True)
    assert options <= set(re.findall(r"--[a-z]+", shown.stdout))


def _exists(folder: Path, name: str) -> bool:
    """Return whether a README's file is in its folder, in the checkout, or made by the example."""
    places = (folder, folder.parent, folder.parents[1])
    return name.startswith(".sluice/") or any((place / name).exists() for place in places)
