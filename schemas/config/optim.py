"""The optimizer."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import FrozenConfig


class OptimConfig(FrozenConfig):
    """AdamW with warm-up."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate, reached after the warm-up."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""

    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay; 0: none."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm, over all ranks."""

    warmup_updates: NonNegativeInt = 0
    """Updates of linear warm-up; 0: none."""

    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a half cosine down to 0 at the end of the run."""

    updates_per_step: PositiveInt = 1
    """Optimizer updates per step, each on an equal part of its rows."""
