"""The optimizer."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import Frozen


class OptimConfig(Frozen):
    """AdamW with warm-up."""

    lr: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    warmup_updates: NonNegativeInt = 0
    schedule: Literal["constant", "cosine"] = "constant"
    updates_per_step: PositiveInt = 1
