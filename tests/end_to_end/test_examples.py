"""The script of every example folder: a tiny run, which leaves its files in folders that git ignores."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.engine_checks import ENGINE_PYTHON
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/run.py"))

# Packages of optional extras that an example's script needs; without them, its run is skipped.
NEEDS = {"arithmetic": ("reasoning_gym",), "math_lora_vllm": ("peft",), "from_verl": ("tensorboard",)}
# Interpreters of environments and engines, which make makes; without them, an example's run is skipped.
INTERPRETERS = {
    "verifiers_env": EXAMPLES.parent / ".venv-verifiers" / "bin" / "python",
    "math_lora_vllm": Path(ENGINE_PYTHON),
}

NUM_RUNS = {"pipeline": 2}  # of a sweep


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_tiny_run(folder: Path, example: Path, workplace: Workplace) -> None:
    before = _files(example.parent)
    interpreter = ("--python", str(INTERPRETERS[folder.name])) if folder.name in INTERPRETERS else ()
    printed = workplace.python(str(example.relative_to(workplace.folder) / "run.py"), "--tiny", *interpreter)
    found = [path.parent for path in example.glob(".sluice/runs/*/metrics.jsonl")]
    runs = [run for run in found if "sft" not in run.name.split("-")]  # nor the run of supervised fine-tuning
    assert len(runs) == NUM_RUNS.get(folder.name, 1)
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rewards = [row["metrics"]["reward"] for row in rows if row["kind"] == "step"]
        assert len(rewards) == 2
        assert all(math.isfinite(reward) for reward in rewards)
        assert (run / "report.html").exists()
        assert (run / "summary.json").exists()
        assert list(run.glob("policy/step-000002/manifest.json"))
    assert ElementTree.parse(example / ".sluice" / "curve.svg").getroot().tag.endswith("svg")
    assert re.search(r"^\$ .*sluice (train config\.toml|pipeline pipeline\.toml|demo) ", printed, re.MULTILINE)
    assert _files(example.parent) == before  # all else is in ignored folders


def _files(root: Path) -> dict[str, float]:
    """Return the files under a folder and their times, without those that git ignores."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in (".sluice", "__pycache__")]
        found.update({str(path): path.stat().st_mtime for name in names if (path := Path(folder) / name)})
    return found
