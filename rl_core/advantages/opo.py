"""OPO's advantages: the baseline that minimises the gradient's variance."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import OpoAdvantage


def opo_advantages(inputs: AdvantageInputs, config: OpoAdvantage) -> Floats:
    """Reward - the group's mean reward weighed by response length.

    Hao et al. 2025, arXiv:2505.23585, section 3.2: the squared norm of a response's gradient is taken to grow
    with its length.

    Args:
        inputs: The step's rows.
        config: Has no parameters.

    Returns:
        [N] float64. A group without any response token has the plain mean as baseline; it trains nothing.
    """
    lengths = np.bincount(inputs.group, weights=inputs.response_lengths)
    weights = np.where(lengths[inputs.group] > 0, inputs.response_lengths, 1)
    totals = np.bincount(inputs.group, weights=weights)
    baseline = np.bincount(inputs.group, weights=weights * inputs.rewards) / totals
    advantages: Floats = inputs.rewards - baseline[inputs.group]
    return advantages
