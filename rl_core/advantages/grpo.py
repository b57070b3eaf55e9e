"""GRPO's group-relative advantages."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import GrpoAdvantage


def grpo_advantages(config: GrpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute (reward - group mean) / (group sample standard deviation + epsilon).

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2; the standard deviation has ddof = 1.

    Args:
        config: `epsilon` is added to the standard deviation.
        inputs: The step's rows.

    Returns:
        [N] float64.
    """
    centered = inputs.centered
    variance = np.bincount(inputs.group, weights=centered**2) / np.maximum(inputs.group_sizes - 1, 1)
    advantages: Floats = centered / (np.sqrt(variance) + config.epsilon)[inputs.group]
    return advantages
