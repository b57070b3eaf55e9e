"""The policy loss."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from schemas.base import Frozen


class ClippedLoss(Frozen):
    """PPO's clipped surrogate; `clip_high > clip_low` is DAPO's clip-higher. The KL term is k3."""

    kind: Literal["clipped"] = "clipped"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    kl_coef: NonNegativeFloat = 0.0  # 0: no reference model is loaded


LossConfig = ClippedLoss
