"""Advantage estimators."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from schemas.base import FrozenConfig
from schemas.config.kinds import default_kind


class GrpoAdvantage(FrozenConfig):
    """(reward - group mean) / (group sample std + epsilon) (Shao et al. 2024, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    """Selects GRPO, the default."""

    epsilon: PositiveFloat = 1e-6
    """Added to the group's standard deviation, in units of the reward."""


class DrGrpoAdvantage(FrozenConfig):
    """reward - group mean (Liu et al. 2025, arXiv:2503.20783)."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    """Selects Dr. GRPO."""


class RlooAdvantage(FrozenConfig):
    """reward - mean of the group's other rewards (Ahmadian et al. 2024, arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    """Selects RLOO, the leave-one-out baseline."""


class ReinforcePlusPlusAdvantage(FrozenConfig):
    """reward - group mean, whitened over all trained tokens (Hu et al. 2025, arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Selects REINFORCE++ with a group baseline."""

    epsilon: PositiveFloat = 1e-8
    """Added to the standard deviation over the step's trained tokens, in units of the reward."""


class OpoAdvantage(FrozenConfig):
    """reward - length-weighted group mean (Hao et al. 2025, arXiv:2505.23585)."""

    kind: Literal["opo"] = "opo"
    """Selects OPO."""


class TurnLevelAdvantage(FrozenConfig):
    """GRPO per turn: rewards from the turn on, less their mean over the group's turns of its number (arXiv:2505.11821).

    Differs from Zeng et al. 2025 in the divisor, which is that of the trajectories' rewards for every turn.
    """

    kind: Literal["turn_level"] = "turn_level"
    """Selects advantages per turn, for environments that reward turns."""

    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation of the group's rewards, in units of the reward."""


AdvantageConfig = Annotated[
    Annotated[
        GrpoAdvantage
        | DrGrpoAdvantage
        | RlooAdvantage
        | ReinforcePlusPlusAdvantage
        | OpoAdvantage
        | TurnLevelAdvantage,
        Field(discriminator="kind"),
    ],
    default_kind("grpo"),
]
