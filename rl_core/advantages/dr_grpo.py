"""Dr. GRPO advantages: GRPO without the division by the standard deviation."""

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import DrGrpoAdvantage


def dr_grpo_advantages(config: DrGrpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - group mean (Liu et al. 2025, arXiv:2503.20783, section 3.2).

    Args:
        config: Has no parameters.
        inputs: The step's rows.

    Returns:
        [N] float64.
    """
    return inputs.centered
