"""Tensors, saves and comparisons for the tests of checkpoints."""

from typing import Any

import torch

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


def load(store: CheckpointStore, version: int) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(version).items()}
    store.load(version, into)
    return into


def newest_version(store: CheckpointStore) -> int | None:
    found = store.newest()
    return None if found is None else found[0]


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype, name
        assert torch.equal(tensor, actual[name]), name
