"""Checkpoints of several ranks, and saves that are killed, in processes of their own (`checkpoint_processes`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.checkpoints.store import CheckpointStore
from tests.support import checkpoint_processes
from tests.support.checkpoint_tensors import assert_equal, newest_version
from tests.support.measured_memory import ENVIRONMENT


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of `checkpoint_processes`: saves and loads of two ranks, and killed saves."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.support.checkpoint_processes", str(folder)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return folder


def test_nothing_in_a_checkpoint_is_a_pickle(processes: Path) -> None:
    files = [file for file in processes.glob("by-*/step-000001/**/*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert not [file for file in files if file.read_bytes().startswith((b"\x80", b"PK"))]  # a pickle, or torch.save's


@pytest.mark.parametrize("point", checkpoint_processes.POINTS)
def test_a_killed_save_leaves_the_previous_checkpoint_the_newest(
    processes: Path, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(str(processes / f"killed-at-{Path(point).name}"))
    assert Path(store.path(2)).exists()
    assert newest_version(store) == 1
    assert "step-000002/manifest.json is missing: the checkpoint was never finished" in caplog.text
    weights = {name: torch.zeros_like(value) for name, value in checkpoint_processes.WEIGHTS.items()}
    store.load(1, weights)
    assert_equal(weights, checkpoint_processes.WEIGHTS)
    store.save(2, weights, num_updates=2, report=None).wait()
    assert newest_version(store) == 2
    assert not list(Path(store.path(2)).rglob(".*"))


@pytest.mark.parametrize(("source", "num_ranks"), [("by-one", 1), ("by-two", 2), ("by-four", 4)])
def test_checkpoints_of_any_ranks_are_the_same(processes: Path, source: str, num_ranks: int) -> None:
    store, folder = CheckpointStore(str(processes / source)), processes / source
    expected = load_file(folder / "expected.safetensors")
    assert store.verify(1).num_ranks == num_ranks
    assert store.tensor_names(1) == sorted(expected)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    store.load(1, loaded)
    assert_equal(loaded, expected)
    for loaded_file in folder.glob("loaded-by-*.safetensors"):
        assert_equal(load_file(loaded_file), expected)
    assert (folder / "loaded-by-two.safetensors").exists()
    assert (folder / "loaded-by-four.safetensors").exists() == (source == "by-one")


@pytest.mark.parametrize("source", ["again-by-two", "again-by-four"])
def test_what_ranks_save_again_is_planned_once_and_written_whole(processes: Path, source: str) -> None:
    store, folder = CheckpointStore(str(processes / source)), processes / source
    for version in range(1, 5):
        expected = load_file(folder / f"expected-{version}.safetensors")
        assert store.verify(version)
        assert store.tensor_names(version) == sorted(expected)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        store.load(version, loaded)
        assert_equal(loaded, expected)
    first, second, restored, with_previous = json.loads((folder / "planned.json").read_text())
    assert second == restored == 0
    assert with_previous > first > 0


def test_each_rank_writes_its_part_and_replicated_tensors_are_written_once(processes: Path) -> None:
    first, second = (
        load_file(processes / "by-two/step-000001" / f"rank-0000{rank}-00000.safetensors") for rank in (0, 1)
    )
    assert [len(part["model/0.weight"]) for part in (first, second)] == [3, 2]  # of 5 rows
    assert ("rng/torch" in first) + ("rng/torch" in second) == 1


def test_a_rank_that_dies_fails_the_save_and_leaves_the_previous_checkpoint_the_newest(processes: Path) -> None:
    assert (processes / "lost.txt").read_text()
    assert newest_version(CheckpointStore(str(processes / "by-two"))) == 1
