"""OPO advantages: the baseline that minimizes the variance of the gradient."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import OpoAdvantage


def opo_advantages(config: OpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - length-weighted mean reward of the group.

    Hao et al. 2025, arXiv:2505.23585, section 3.2: the squared gradient norm of a response is assumed to be
    proportional to its length.

    Args:
        config: Has no parameters.
        inputs: The step's rows.

    Returns:
        [N] float64. A group without any response token, which trains nothing, has the plain mean as its baseline.
    """
    lengths = np.bincount(inputs.group, weights=inputs.response_lengths)
    weights = np.where(lengths[inputs.group] > 0, inputs.response_lengths, 1)
    totals = np.bincount(inputs.group, weights=weights)
    baseline = np.bincount(inputs.group, weights=weights * inputs.rewards) / totals
    advantages: Floats = inputs.rewards - baseline[inputs.group]
    return advantages
