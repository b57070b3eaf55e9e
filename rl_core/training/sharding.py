"""FSDP2: each rank holds a shard of every parameter; gradients are summed over the ranks, never averaged."""

from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from schemas.errors import ModelError

Value = TypeVar("Value")
ComputeDtype = Literal["float32", "bfloat16"]


def make_mesh(device_type: str, num_ranks: int, num_replicas: int = 1) -> DeviceMesh:
    """Arrange the ranks of the default process group: all as shards, or as replicas of equally many shards.

    Args:
        device_type: `cpu` or `cuda`.
        num_ranks: R.
        num_replicas: Copies of the weights; a divisor of R. Neighboring ranks are in the same one.
    """
    if num_replicas == 1:
        return init_device_mesh(device_type, (num_ranks,))
    shape = (num_replicas, num_ranks // num_replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def single_rank_mesh(device_type: str) -> DeviceMesh:
    """Return a mesh of this process alone, which needs no other process group."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (1,))


def shard(module: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: ComputeDtype) -> None:
    """Shard `module` in place: each decoder layer of `model` as a unit, then the remaining parameters.

    Parameters keep their dtype; gathered, they have the compute dtype. Gradients are summed in float32 over
    micro-batches and ranks, not averaged: every rank's loss is divided by the denominators of the whole update.

    Args:
        module: The root module, whose `forward` is called; it contains the model.
        model: The model inside it.
        mesh: The data-parallel ranks, as `make_mesh` arranges them.
        compute_dtype: Dtype of forward and backward.

    Raises:
        ModelError: The model doesn't declare its layer classes.
    """
    if not (layers := layer_modules(model)):
        raise ModelError(
            f"{type(model).__name__} declares no layers to shard (`_no_split_modules` is empty); set"
            ' runtime.num_policy_ranks = 1 and model.compute_dtype = "float32"'
        )
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, compute_dtype), reduce_dtype=torch.float32)
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def sync_gradients(module: nn.Module, enabled: bool) -> None:
    """Have the next backward sum gradients over the ranks, or keep them whole on this one; no-op if not sharded."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)


def release_gathered(module: nn.Module) -> None:
    """Free the weights that a forward has gathered and that no backward will free; no-op if it is not sharded.

    FSDP keeps those outside of the layers gathered after a forward, for the backward that usually follows.
    """
    if isinstance(module, FSDPModule):
        module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks (a collective); return a plain tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_gather_object(value: Value, mesh: DeviceMesh | None, group: ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks, on every rank (a collective); values should be small, as they are pickled.

    Args:
        value: This rank's.
        mesh: The ranks; None: this one only.
        group: A process group of the same ranks; None: the default one.
    """
    if mesh is None:
        return [value]
    values: list[Value | None] = [None] * mesh.size()
    dist.all_gather_object(values, value, group)  # the ranks are the default process group
    return values  # type: ignore[return-value]  # the collective has filled all entries


def layer_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's decoder layers, in order: the units that are sharded; empty if it doesn't declare them.

    A sharded layer's class is one that FSDP derives from the layer's own.
    """
    classes = set(model._no_split_modules or ())
    return [part for part in model.modules() if any(each.__name__ in classes for each in type(part).__mro__)]
