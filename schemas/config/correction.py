"""Importance correction for an engine whose log-probs differ from the trainer's."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from schemas.base import FrozenConfig
from schemas.config.kinds import default_kind


class NoCorrection(FrozenConfig):
    """No correction; the mismatch is only reported."""

    kind: Literal["none"] = "none"
    """Disables the correction; the default without the section."""


class TruncatedCorrection(FrozenConfig):
    """Truncated importance sampling: weight tokens by min(exp(behavior - sampler log-prob), cap).

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """

    kind: Literal["truncated"] = "truncated"
    """Selects truncated importance sampling; the default within the section."""

    level: Literal["token", "sequence"] = "token"
    """Weight of each token (`token`), or the product over its sequence's trained tokens (`sequence`)."""

    cap: PositiveFloat = 2.0
    """Upper bound of the weights."""


class MaskedCorrection(FrozenConfig):
    """Masked importance sampling: weight tokens by exp(behavior - sampler log-prob), and mask out-of-bounds weights.

    At the token level it is IcePop, whose bounds are the defaults (Ling Team 2025, arXiv:2510.18855).
    """

    kind: Literal["masked"] = "masked"
    """Selects masked importance sampling."""

    level: Literal["token", "sequence"] = "token"
    """Weight of each token (`token`), or the product over its sequence's trained tokens (`sequence`)."""

    low: PositiveFloat = 0.5
    """Tokens with a smaller weight are masked: their policy term is 0."""

    high: PositiveFloat = 5.0
    """Tokens with a larger weight are masked: their policy term is 0."""

    @model_validator(mode="after")
    def _ordered(self) -> "MaskedCorrection":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


CorrectionConfig = Annotated[
    Annotated[NoCorrection | TruncatedCorrection | MaskedCorrection, Field(discriminator="kind")],
    default_kind("truncated"),
]
