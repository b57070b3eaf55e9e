"""The Dockerfile: what it copies is enough to build the distribution, and what it installs is defined."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.deploy_commands import parse
from tests.support.deploy_files import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COPIED = [path for line in re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = {"FROM", "RUN", "ENV", "ARG", "WORKDIR", "COPY", "USER", "CMD"}


def test_instructions() -> None:
    lines = re.sub(
        r"\\\n", "", "".join(f"{line}\n" for line in DOCKERFILE.splitlines() if line[:1] != "#")
    ).splitlines()
    assert {line.split()[0] for line in lines if line} == INSTRUCTIONS
    stages = [line.split()[1:] for line in lines if line.startswith("FROM ")]
    assert [stage[-1] for stage in stages] == ["base", "trainer", "engine"]
    assert [stage[0] for stage in stages[1:]] == ["base", "trainer"]
    trainer = lines[: lines.index("FROM trainer AS engine")]
    assert [line for line in trainer if line][-3:] == ["USER sluice", "WORKDIR /data", 'CMD ["sluice", "--help"]']
    assert lines[-1] == "USER sluice"  # not root


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_engine_is_installed_by_sluice_s_own_command(device: str) -> None:
    (command,) = re.findall(r"^RUN PIP_NO_CACHE_DIR=1 (sluice .+)$", DOCKERFILE, re.MULTILINE)
    found = parse(command.replace("${VLLM}", device).split())
    assert (found["name"], found[device], str(found["folder"])) == ("vllm", True, "/opt/engine")
    assert "vllm" not in DOCKERFILE[: DOCKERFILE.index("FROM trainer AS engine")].split("\nFROM ", 1)[1].lower()
    texts = [path.read_text() for path in (DEPLOY / "kubernetes").glob("ray*.yaml")]
    assert all("rollout.python=/opt/engine/bin/python" in text for text in texts)


def test_the_python_is_one_that_the_project_supports() -> None:
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-", DOCKERFILE, re.MULTILINE)
    assert version in SpecifierSet(PROJECT["requires-python"])


def test_extras_exist() -> None:
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', DOCKERFILE)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()


def test_what_is_copied_exists_and_is_in_the_build_s_context() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[1] == "*"
    assert {path.rstrip("/") for path in COPIED} == kept
    assert not [path for path in COPIED if not (ROOT / path).exists()]


def test_the_distribution_is_built_from_what_is_copied(tmp_path: Path) -> None:
    names = wheel_files(tmp_path, COPIED)
    data = {"flows/configs/demo.toml", "flows/report/page.html", "flows/view/static/app.js", "schemas/py.typed"}
    assert {"flows/cli/main.py", *data} <= names


def test_the_dependencies_are_installed_without_the_packages(tmp_path: Path) -> None:
    assert not [name for name in wheel_files(tmp_path, COPIED[: COPIED.index("schemas/")]) if name.endswith(".py")]


def wheel_files(folder: Path, copied: list[str]) -> set[str]:
    """Build the distribution from these paths of the repository; return the names of its files."""
    context = folder / "context"
    for path in copied:
        target = context / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, target)
    build = [
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        str(folder),
        str(context),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())
