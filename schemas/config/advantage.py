"""Advantage estimators; penalty and mask for responses that reach, or nearly reach, the token limit."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from schemas.base import FrozenConfig
from schemas.config.kinds import default_kind


class GrpoAdvantage(FrozenConfig):
    """(reward - group mean) / (group sample std + epsilon) (Shao et al. 2024, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"

    epsilon: PositiveFloat = 1e-6
    """Added to the group's standard deviation, in units of the reward."""


class DrGrpoAdvantage(FrozenConfig):
    """reward - group mean (Liu et al. 2025, arXiv:2503.20783)."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class RlooAdvantage(FrozenConfig):
    """reward - mean of the group's other rewards (Ahmadian et al. 2024, arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(FrozenConfig):
    """reward - group mean, whitened over all trained tokens (Hu et al. 2025, arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    epsilon: PositiveFloat = 1e-8
    """Added to the standard deviation over the step's trained tokens, in units of the reward."""


class OpoAdvantage(FrozenConfig):
    """reward - length-weighted group mean (Hao et al. 2025, arXiv:2505.23585)."""

    kind: Literal["opo"] = "opo"


class TurnLevelAdvantage(FrozenConfig):
    """GRPO per turn: rewards from the turn on, less their mean over the group's turns of its number (arXiv:2505.11821).

    Differs from Zeng et al. 2025 in the divisor, which is that of the trajectories' rewards for every turn.
    """

    kind: Literal["turn_level"] = "turn_level"

    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation of the group's rewards, in units of the reward."""


class MaxRlAdvantage(FrozenConfig):
    """(reward - group mean) / group mean; 0 where that is not positive (Tajwar et al. 2026, arXiv:2602.02710)."""

    kind: Literal["max_rl"] = "max_rl"


class GdpoAdvantage(FrozenConfig):
    """Each part of a weighted reward as in GRPO; their sum is normalized over the step (arXiv:2601.05242).

    GDPO, Liu et al. 2026: rewards of different scales or variances count as their weights say.
    """

    kind: Literal["gdpo"] = "gdpo"

    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviations: of each part over its group, in its units, and of the sum over the step."""


AdvantageConfig = Annotated[
    Annotated[
        GrpoAdvantage
        | DrGrpoAdvantage
        | RlooAdvantage
        | ReinforcePlusPlusAdvantage
        | OpoAdvantage
        | TurnLevelAdvantage
        | MaxRlAdvantage
        | GdpoAdvantage,
        Field(discriminator="kind"),
    ],
    default_kind("grpo"),
]


class OverlongConfig(FrozenConfig):
    """DAPO's soft overlong punishment and overlong filtering (Yu et al. 2025, arXiv:2503.14476, section 3.4)."""

    buffer_tokens: NonNegativeInt = 0
    """The penalty grows linearly over this many last tokens before the response limit; 0: no penalty."""

    penalty: NonNegativeFloat = 1.0
    """Subtracted from the reward of a response at the limit, in units of the reward."""

    mask_truncated: bool = False
    """Don't train on responses cut off by the limit; they still count in their group's baseline."""
