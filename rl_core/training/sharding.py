"""FSDP2: each rank holds a shard of every parameter; gradients are summed over the ranks, never averaged."""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from schemas.errors import ModelError

Value = TypeVar("Value")


def shard(module: nn.Module, model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard `module` in place: each decoder layer of `model` as a unit, then the remaining parameters.

    Every rank's loss is already divided by the denominators of the whole update, so gradients are summed over the
    ranks, not averaged.

    Args:
        module: The root module, whose `forward` is called; it contains the model.
        model: The model inside it.
        mesh: One dimension, the data-parallel ranks.

    Raises:
        ModelError: The model doesn't declare its layer classes.
    """
    layers = [part for part in model.modules() if type(part).__name__ in _layer_classes(model)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} declares no layers to shard (`_no_split_modules` is empty); set"
            " runtime.num_policy_ranks = 1"
        )
    for part in (*layers, module):
        fully_shard(part, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks (a collective); return a plain tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_gather_object(value: Value, mesh: DeviceMesh | None) -> list[Value]:
    """Return the values of all ranks, on every rank (a collective); values should be small, as they are pickled."""
    if mesh is None:
        return [value]
    values: list[Value | None] = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values  # type: ignore[return-value]  # the collective has filled all entries


def _layer_classes(model: PreTrainedModel) -> set[str]:
    return set(model._no_split_modules or ())
