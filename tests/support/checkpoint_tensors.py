"""Tensors, saves and comparisons for the tests of checkpoints."""

from pathlib import Path
from typing import Any

import torch

from infra.checkpoints.files import Manifest, step_name
from infra.checkpoints.shards import INDEX
from infra.checkpoints.store import CheckpointStore

SHARD = "rank-00000-00000.safetensors"


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((4, 3), float(version)),
        "model/b": torch.arange(5).to(torch.bfloat16),
        "optimizer/step/a": torch.tensor(float(version)),
        "rng/torch": torch.arange(9, dtype=torch.uint8),
    }


def save(store: CheckpointStore, version: int, **options: Any) -> str:
    return store.save(version, tensors_of(version), num_updates=version, report=None, **options).wait()


def save_assets(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def load(store: CheckpointStore, version: int) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(version).items()}
    store.load(version, into)
    return into


def drop_index(store: CheckpointStore, version: int) -> None:
    """Make a checkpoint one of an earlier version, which has no index."""
    manifest = store.read_manifest(version)
    store._commit(manifest.replace(files={name: file for name, file in manifest.files.items() if name != INDEX}))
    store._folder.remove(f"{step_name(version)}/{INDEX}")


def newest_version(store: CheckpointStore) -> int | None:
    found = store.newest()
    return None if found is None else found[0]


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype, name
        assert torch.equal(tensor, actual[name]), name


def assert_checkpoints_are_kept(url: str, options: dict[str, Any] | None = None) -> None:
    """Assert that an empty place keeps checkpoints, notices a damaged one, and loses the one that was not completed."""
    store = CheckpointStore(url, options)
    assert store.newest() is None
    for version in range(1, 4):
        save(store, version, write_assets=save_assets)
    again = CheckpointStore(str(store), options)  # as another process has it
    assert_equal(load(again, 3), tensors_of(3))
    found = again.newest()
    assert found is not None
    assert isinstance(found[1], Manifest)
    assert (found[0], len(found[1].files)) == (3, 4)
    store._folder.write("step-000003/rank-00000-00000.safetensors", b"damage")
    assert newest_version(again) == 2
    with store.assets(2) as folder:
        assert (folder / "config.json").read_text() == "{}"
    store._folder.remove("step-000001/manifest.json")
    store.retain(3, 2)
    assert again.complete_versions() == [2, 3]
    assert not again._folder.sizes("step-000001")
