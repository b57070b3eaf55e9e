"""The buckets in which weights are sent: which tensors are in each, in which dtype, and which needn't be sent again.

A bucket is a flat buffer (`infra.models.flat_tensors`) of whole tensors that follow one another. Both sides compute the
same buckets from the specs of all tensors.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from infra.models.flat_tensors import flat_bytes, tensor_specs
from infra.models.lora import changing_names, trainable_names
from rl_core.training.sharding import full_tensor
from schemas.weights import TensorSpec

_BLOCK = re.compile(r".*?\.\d+\.[^.]+(?=\.)")  # such as model.layers.0.self_attn


def block_of(name: str) -> str:
    """Return the block of a tensor: the part of its layer that it belongs to, or its module if it is in no layer.

    Engines fuse tensors of one block only, such as the projections of queries, keys and values.

    >>> block_of("model.layers.0.mlp.experts.7.up_proj.weight"), block_of("model.norm.weight")
    ('model.layers.0.mlp', 'model.norm')
    """
    found = _BLOCK.match(name)
    return found.group() if found else name.rpartition(".")[0]


def split_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Split tensors into buckets, in order.

    A block is not split unless it is larger than a bucket; a tensor that is larger is a bucket of its own.

    Args:
        specs: All tensors.
        bucket_bytes: The most bytes of a bucket of more than one tensor.
    """
    buckets: list[list[TensorSpec]] = []
    filled = 0
    for _, block in groupby(specs, key=lambda spec: block_of(spec.name)):
        tensors = list(block)
        for part in [tensors] if flat_bytes(tensors) <= bucket_bytes else [[spec] for spec in tensors]:
            num_bytes = flat_bytes(part)
            if not buckets or filled + num_bytes > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1] += part
            filled += num_bytes
    return buckets or [[]]


def sent_bytes(specs: Sequence[TensorSpec], bucket_bytes: int) -> int:
    """Return the bytes of all buckets."""
    return sum(flat_bytes(bucket) for bucket in split_buckets(specs, bucket_bytes))


def sent_specs(weights: Mapping[str, Tensor], dtype: str) -> tuple[TensorSpec, ...]:
    """Return the specs of weights as they are sent to engines whose weights have this dtype.

    Vectors stay as they are: they are few bytes, and engines keep some of them in float32.

    Args:
        weights: The policy's, by name; they may be sharded.
        dtype: The engines', by torch's name.
    """
    return tuple(
        spec.replace(dtype=dtype) if weights[spec.name].is_floating_point() and len(spec.shape) > 1 else spec
        for spec in tensor_specs(weights)
    )


def gathered(weights: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight whole, in the dtype of its spec, rounded to nearest even, as engines round.

    Sharded ones are rounded before they are gathered, which is a collective: all ranks hold the whole tensor.
    """
    for (name, tensor), spec in zip(weights.items(), specs, strict=True):
        yield name, full_tensor(tensor.detach().to(getattr(torch, spec.dtype)))


def with_whole_blocks(weights: Mapping[str, Tensor], changed: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights of all blocks in which one has changed, in order."""
    blocks = {block_of(name) for name in changed}
    return {name: tensor for name, tensor in weights.items() if block_of(name) in blocks}


def changing_weights(weights: Mapping[str, Tensor], model: nn.Module, *, as_adapters: bool) -> dict[str, Tensor]:
    """Return those of a policy's weights that an engine with another version lacks, in order.

    Args:
        weights: All weights by name; see `infra.models.lora.published_weights`.
        model: The policy.
        as_adapters: Whether they are those of an adapted model, of which the trained ones suffice; else, blocks are
            whole, because engines fuse the tensors of one.
    """
    if not as_adapters:
        return with_whole_blocks(weights, changing_names(model))
    return {name: weights[name] for name in trainable_names(model)}


def join_gather(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Take part in gathering all tensors, which may be a collective, and discard them: for ranks that don't send."""
    deque(tensors, maxlen=0)
