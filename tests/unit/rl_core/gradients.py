"""Gradients of a model, and how far two sets of them are apart."""

from torch import Tensor, nn


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the norm of the difference over the norm, of all parameters' gradients together."""
    assert len(ours) == len(theirs)
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in theirs)) ** 0.5
