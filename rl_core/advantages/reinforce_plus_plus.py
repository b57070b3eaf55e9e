"""REINFORCE++'s advantages with a group baseline: centred by group, scaled by the whole step."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import ReinforcePlusPlusAdvantage


def reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs, config: ReinforcePlusPlusAdvantage) -> Floats:
    """Reward - group mean, whitened: less its mean, over (its sample standard deviation + epsilon).

    Hu et al. 2025, arXiv:2501.03262v9, "REINFORCE++ w/ Baseline". The mean and the standard deviation are those
    of the step's trained tokens: a row's value weighs as many times as it has loss tokens. Rows of flat groups
    take part in them with their 0.

    Args:
        inputs: The step's rows.
        config: Its `epsilon` is added to the standard deviation (ddof = 1, in tokens).

    Returns:
        [N] float64; all 0 where no token is trained or all trained tokens have one value.
    """
    centred, weights = inputs.centred, inputs.loss_tokens
    num_tokens = weights.sum()
    if not num_tokens:
        return np.zeros_like(centred)
    shifted = centred - (weights * centred).sum() / num_tokens
    variance = (weights * shifted**2).sum() / max(num_tokens - 1, 1)
    if not variance:
        return np.zeros_like(centred)
    whitened: Floats = shifted / (np.sqrt(variance) + config.epsilon)
    return whitened
