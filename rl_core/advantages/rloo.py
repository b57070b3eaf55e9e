"""RLOO's advantages: each row against the others of its group."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import RlooAdvantage


def rloo_advantages(inputs: AdvantageInputs, config: RlooAdvantage) -> Floats:
    """Reward - mean reward of the group's other rows (Ahmadian et al. 2024, arXiv:2402.14740, equation 8).

    That is n / (n - 1) times (reward - group mean), with n rows in the group.

    Args:
        inputs: The step's rows.
        config: Has no parameters.

    Returns:
        [N] float64.
    """
    sizes = inputs.group_sizes
    advantages: Floats = inputs.centred * (sizes / np.maximum(sizes - 1, 1))[inputs.group]
    return advantages
