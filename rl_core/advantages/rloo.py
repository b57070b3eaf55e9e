"""RLOO advantages: each row's reward against a leave-one-out baseline."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import RlooAdvantage


def rloo_advantages(config: RlooAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - mean reward of the group's other rows (Ahmadian et al. 2024, arXiv:2402.14740, equation 8).

    It equals n / (n - 1) times (reward - group mean), with n rows in the group.

    Args:
        config: Has no parameters.
        inputs: The step's rows.

    Returns:
        [N] float64.
    """
    sizes = inputs.group_sizes
    advantages: Floats = inputs.centered * (sizes / np.maximum(sizes - 1, 1))[inputs.group]
    return advantages
