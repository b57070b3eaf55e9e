"""Advantages of MaxRL: the centered reward, relative to the group's mean reward."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import MaxRlAdvantage


def max_rl_advantages(config: MaxRlAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute (reward - group mean) / group mean.

    Args:
        config: Has no parameters.
        inputs: The step's rows.

    Returns:
        [N] float64; 0 in groups whose mean reward is not positive.
    """
    means = (np.bincount(inputs.group, weights=inputs.rewards) / inputs.group_sizes)[inputs.group]
    positive = means > 0
    advantages: Floats = np.where(positive, inputs.centered / np.where(positive, means, 1.0), 0.0)
    return advantages
