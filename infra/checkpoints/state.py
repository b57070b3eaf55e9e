"""What of a policy is saved: its weights, its optimizer's state and torch's random state, by name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from infra.checkpoints.store import CheckpointStore

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng/torch"
PREVIOUS = "previous"  # the trained weights of the version before, where it samples the next step


def copy_trained(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights that are trained, by name, sharded as they are."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def swapped_weights(model: nn.Module, trained: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model hold other values of the weights that are trained, and its own again afterwards."""
    own = copy_trained(model)
    _put_trained(model, trained)
    try:
        yield
    finally:
        _put_trained(model, own)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights that a checkpoint holds, as `model/<name>`: only those that are trained, if some are frozen.

    Tied weights are there once. A buffer that the model saves (a router's bias, for example) counts as a weight.
    """
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if len(trained) == len(parameters):
        state = model.state_dict(keep_vars=True)
        trained |= {name: value for name, value in state.items() if not isinstance(value, nn.Parameter)}
    return {f"{MODEL}/{name}": value for name, value in trained.items()}


def policy_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, previous: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """All that a checkpoint of a policy holds.

    Args:
        model: With its current weights.
        optimizer: Over them.
        previous: The trained weights of the version before, see `copy_trained`; None: they are not saved.
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
    """Put a checkpoint's weights, optimizer state and torch's random state back, bit for bit.

    Args:
        store: Where the checkpoint is.
        version: Which one.
        model: Built, adapted and sharded as when it was saved, but for the number of ranks.
        optimizer: New, over the model's parameters.
        previous: Where the trained weights of the version before go, by name; None: they are not needed.

    Raises:
        CheckpointError: The checkpoint is not there, or is not of such a model and optimizer.
    """
    names = store.tensor_names(version)
    if any(name.startswith(f"{OPTIMIZER}/") for name in names):
        _allocate_state(optimizer)
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


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state: one step of zero gradients at rate zero, which leaves the weights."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in filter(lambda parameter: parameter.requires_grad, group["params"]):
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
