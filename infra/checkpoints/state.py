"""The state of a policy that a checkpoint saves: weights, optimizer state and torch's random state, by name."""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from infra.checkpoints.store import CheckpointStore
from infra.models.lora import has_adapter

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng/torch"
PREVIOUS = "previous"  # the previous version's trained weights, if that version may sample the next step


def copy_trained(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the trained weights, by name, with their sharding."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def swapped_weights(model: nn.Module, trained: Mapping[str, Tensor]) -> Iterator[None]:
    """Swap other values of the trained weights into the model for the duration, then restore its own."""
    own = copy_trained(model)
    _put_trained(model, trained)
    try:
        yield
    finally:
        _put_trained(model, own)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a checkpoint holds, as `model/<name>`: the adapters' if it has any, else all.

    Tied weights appear once. What the model itself freezes, and a buffer that it saves (e.g. a router's bias), counts
    as a weight.
    """
    if has_adapter(model):
        return {f"{MODEL}/{name}": weight for name, weight in model.named_parameters() if weight.requires_grad}
    buffers = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, nn.Parameter)
    }
    return {f"{MODEL}/{name}": value for name, value in (dict(model.named_parameters()) | buffers).items()}


def policy_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, previous: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return all tensors that a checkpoint of a policy holds, by name.

    Args:
        model: The model with its current weights.
        optimizer: The optimizer of these weights.
        previous: The previous version's trained weights, see `copy_trained`; None if they are not saved.
    """
    return {
        **model_tensors(model),
        **_optimizer_tensors(model, optimizer),
        **{f"{PREVIOUS}/{name}": value for name, value in (previous or {}).items()},
        RNG: torch.get_rng_state(),
    }


def restore_policy(
    store: CheckpointStore,
    version: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    previous: Mapping[str, Tensor] | None = None,
) -> None:
    """Restore a checkpoint's weights, optimizer state and torch's random state, bit for bit.

    Args:
        store: The run's checkpoints.
        version: The version to restore.
        model: The model, built, adapted and sharded as when it was saved, except for the number of ranks.
        optimizer: A new optimizer of the model's parameters.
        previous: Tensors that receive the previous version's trained weights, by name; None if they are not needed.

    Raises:
        CheckpointError: The checkpoint is missing, or doesn't match the model and optimizer.
    """
    with store.opened(version):
        stepped = {name.split("/", 2)[2] for name in store.tensor_names(version) if name.startswith(f"{OPTIMIZER}/")}
        if stepped:
            _allocate_state(optimizer, {weight for name, weight in model.named_parameters() if name in stepped})
        tensors = policy_tensors(model, optimizer, previous)
        store.load(version, tensors)
    torch.set_rng_state(tensors[RNG])


@torch.no_grad()
def _put_trained(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(values[name])


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{OPTIMIZER}/{slot}/{name}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def _allocate_state(optimizer: torch.optim.Optimizer, weights: Set[nn.Parameter]) -> None:
    """Make a new optimizer allocate its state: a step with zero gradients and learning rates, which keeps the weights.

    A weight that no loss has reached yet has none, and is not among `weights`.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in filter(weights.__contains__, group["params"]):
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
