"""Tensors to publish, and comparisons, for the tests of weights."""

from collections.abc import Mapping
from pathlib import Path

import torch

from infra.engines.base import RolloutEngine, WeightsBucket
from infra.models.flat_tensors import flat_bytes, tensor_specs, write_tensors
from infra.weights.stream import checksum

RUN = "weights"


def tensors(version: int = 0, words: int = 9) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes: one empty, one a scalar, one not contiguous."""
    generator = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(3, 5, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "none": torch.empty(0, 4),
        "scale": torch.tensor(version, dtype=torch.float64),
        "turned": torch.randn(4, 6, generator=generator).half().t(),
        "mask": torch.tensor([True, False, True]),
        "head": torch.randn(words, generator=generator),
    }


def flat(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Write tensors to a flat buffer whose memory held something else before, and return it."""
    specs = tensor_specs(state)
    buffer = torch.full((flat_bytes(specs),), 255, dtype=torch.uint8)
    write_tensors(buffer, specs, state.items())
    return buffer


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def bucket_of(state: Mapping[str, torch.Tensor], file: Path | None = None) -> WeightsBucket:
    """Return tensors as a bucket; its flat buffer is also written to a file, if there is to be one."""
    buffer = flat(state)
    if file is not None:
        file.write_bytes(buffer.numpy())
    return WeightsBucket(dict(state), checksum(buffer), file)


def load_state(engine: RolloutEngine, state: Mapping[str, torch.Tensor], version: int) -> None:
    """Load all of an engine's weights, as one bucket."""
    engine.load_weights(tensor_specs(state), [bucket_of(state)], version)
