"""REINFORCE++ advantages with a group baseline: centered per group, normalized over the whole step."""

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import ReinforcePlusPlusAdvantage


def reinforce_plus_plus_baseline_advantages(config: ReinforcePlusPlusAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - group mean, whitened: minus its mean, over (its sample standard deviation + epsilon).

    Hu et al. 2025, arXiv:2501.03262v9, "REINFORCE++ w/ Baseline". The mean and the standard deviation are over the
    step's trained tokens: a row's value is weighted by its number of loss tokens. Rows of zero-variance groups are
    included, with value 0.

    Args:
        config: `epsilon` is added to the standard deviation (ddof = 1, in tokens).
        inputs: The step's rows.

    Returns:
        [N] float64; all 0 if no token is trained or all trained tokens have the same value.
    """
    centered, weights = inputs.centered, inputs.loss_tokens
    num_tokens = weights.sum()
    if not num_tokens:
        return np.zeros_like(centered)
    shifted = centered - (weights * centered).sum() / num_tokens
    variance = (weights * shifted**2).sum() / max(num_tokens - 1, 1)
    if not variance:
        return np.zeros_like(centered)
    whitened: Floats = shifted / (np.sqrt(variance) + config.epsilon)
    return whitened
