"""Dr. GRPO advantages: GRPO without the division by the standard deviation."""

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import DrGrpoAdvantage


def dr_grpo_advantages(inputs: AdvantageInputs, config: DrGrpoAdvantage) -> Floats:
    """Compute reward - group mean (Liu et al. 2025, arXiv:2503.20783, section 3.2).

    Args:
        inputs: The step's rows.
        config: Has no parameters.

    Returns:
        [N] float64.
    """
    return inputs.centered
