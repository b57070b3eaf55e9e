"""How rewards become advantages."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from schemas.base import Frozen
from schemas.config.kinds import default_kind


class GrpoAdvantage(Frozen):
    """(reward - group mean) / (group sample std + epsilon) (Shao et al. 2024, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    epsilon: PositiveFloat = 1e-6


class DrGrpoAdvantage(Frozen):
    """reward - group mean (Liu et al. 2025, arXiv:2503.20783)."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class RlooAdvantage(Frozen):
    """reward - mean of the group's other rewards (Ahmadian et al. 2024, arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantage(Frozen):
    """reward - group mean, then whitened over all trained tokens (Hu et al. 2025, arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    epsilon: PositiveFloat = 1e-8


class OpoAdvantage(Frozen):
    """reward - length-weighted group mean (Hao et al. 2025, arXiv:2505.23585)."""

    kind: Literal["opo"] = "opo"


AdvantageConfig = Annotated[
    Annotated[
        GrpoAdvantage | DrGrpoAdvantage | RlooAdvantage | ReinforcePlusPlusAdvantage | OpoAdvantage,
        Field(discriminator="kind"),
    ],
    default_kind("grpo"),
]
