"""FSDP2: each rank holds a part of every parameter; gradients are sums over the ranks, never means."""

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
    """Shard `module` in place: every decoder layer of `model` by itself, then what is left.

    A loss is a rank's share of a sum that was divided by the update's own denominators, so that gradients add up
    over the ranks and are not averaged.

    Args:
        module: The root, whose `forward` is called; it holds the model.
        model: The model in it.
        mesh: One dimension, the data-parallel ranks.

    Raises:
        ModelError: The model doesn't say which modules its layers are.
    """
    layers = [part for part in model.modules() if type(part).__name__ in _layer_classes(model)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} names no layers to shard by (`_no_split_modules`); use one policy rank"
        )
    for part in (*layers, module):
        fully_shard(part, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one: a collective. A plain one is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or a plain one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(value: Value, mesh: DeviceMesh | None) -> list[Value]:
    """Every rank's small value, on every rank: a collective."""
    if mesh is None:
        return [value]
    values: list[Value | None] = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values  # type: ignore[return-value]  # every rank has filled in its own


def _layer_classes(model: PreTrainedModel) -> set[str]:
    return set(model._no_split_modules or ())
