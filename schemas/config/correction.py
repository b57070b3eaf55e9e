"""Importance correction for an engine whose log-probs differ from the trainer's."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from schemas.base import Frozen
from schemas.config.kinds import default_kind


class NoCorrection(Frozen):
    """The mismatch is logged only."""

    kind: Literal["none"] = "none"


class TruncatedCorrection(Frozen):
    """Weigh tokens by min(exp(behavior - sampler log-prob), cap): truncated importance sampling.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """

    kind: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"  # sequence: the product over its trained tokens
    cap: PositiveFloat = 2.0


class MaskedCorrection(Frozen):
    """Weigh tokens by exp(behavior - sampler log-prob), and leave out those whose weight is outside a band.

    Masked importance sampling; at the level of tokens it is IcePop, whose band is the default (Ling Team 2025,
    arXiv:2510.18855).
    """

    kind: Literal["masked"] = "masked"
    level: Literal["token", "sequence"] = "token"
    low: PositiveFloat = 0.5
    high: PositiveFloat = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> "MaskedCorrection":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


CorrectionConfig = Annotated[
    Annotated[NoCorrection | TruncatedCorrection | MaskedCorrection, Field(discriminator="kind")],
    default_kind("truncated"),
]
