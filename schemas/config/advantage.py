"""How rewards become advantages."""

from typing import Literal

from pydantic import PositiveFloat

from schemas.base import Frozen


class GrpoAdvantage(Frozen):
    """(reward - group mean) / (group sample std + epsilon) (Shao et al. 2024, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    epsilon: PositiveFloat = 1e-6


AdvantageConfig = GrpoAdvantage
