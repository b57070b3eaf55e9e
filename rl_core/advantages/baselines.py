"""Advantages of a row against a baseline: its group's, that of its other rows, or the step's; all [N] float64."""

from dataclasses import replace

import numpy as np

from rl_core.advantages.base import AdvantageInputs, Floats
from schemas.config.advantage import (
    DrGrpoAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
)


def grpo_advantages(config: GrpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute (reward - group mean) / (group sample standard deviation + epsilon).

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2; the standard deviation has ddof = 1.
    """
    centered = inputs.centered
    variance = np.bincount(inputs.group, weights=centered**2) / np.maximum(inputs.group_sizes - 1, 1)
    advantages: Floats = centered / (np.sqrt(variance) + config.epsilon)[inputs.group]
    return advantages


def dr_grpo_advantages(config: DrGrpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - group mean (Liu et al. 2025, arXiv:2503.20783, section 3.2)."""
    return inputs.centered


def opo_advantages(config: OpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - length-weighted mean reward of the group.

    Hao et al. 2025, arXiv:2505.23585, section 3.2: the squared gradient norm of a response is assumed to be
    proportional to its length. A group without any response token, which trains nothing, has the plain mean as its
    baseline.
    """
    lengths = np.bincount(inputs.group, weights=inputs.response_lengths)
    weights = np.where(lengths[inputs.group] > 0, inputs.response_lengths, 1)
    totals = np.bincount(inputs.group, weights=weights)
    baseline = np.bincount(inputs.group, weights=weights * inputs.rewards) / totals
    advantages: Floats = inputs.rewards - baseline[inputs.group]
    return advantages


def reinforce_plus_plus_baseline_advantages(config: ReinforcePlusPlusAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - group mean, whitened: minus its mean, over (its sample standard deviation + epsilon).

    Hu et al. 2025, arXiv:2501.03262v9, "REINFORCE++ w/ Baseline". The mean and the standard deviation are over the
    step's trained tokens: a row's value is weighted by its number of loss tokens. Rows of zero-variance groups are
    included, with value 0. If no token is trained, or all trained tokens have the same value, all are 0. The standard
    deviation has ddof = 1, in tokens.
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


def rloo_advantages(config: RlooAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute reward - mean reward of the group's other rows (Ahmadian et al. 2024, arXiv:2402.14740, equation 8).

    It equals n / (n - 1) times (reward - group mean), with n rows in the group.
    """
    sizes = inputs.group_sizes
    advantages: Floats = inputs.centered * (sizes / np.maximum(sizes - 1, 1))[inputs.group]
    return advantages


def max_rl_advantages(config: MaxRlAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute (reward - group mean) / group mean, 0 if that is not positive (Tajwar et al. 2026, arXiv:2602.02710)."""
    means = (np.bincount(inputs.group, weights=inputs.rewards) / inputs.group_sizes)[inputs.group]
    positive = means > 0
    advantages: Floats = np.where(positive, inputs.centered / np.where(positive, means, 1.0), 0.0)
    return advantages


def gdpo_advantages(config: GdpoAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute GRPO's advantage of each part, sum them by weight, and normalize the sums over the step's rows.

    Liu et al. 2026, arXiv:2601.05242, equations 4 to 7; the standard deviations have ddof = 1.
    Without parts, the rewards are the only one.
    """
    grpo, sums = GrpoAdvantage(epsilon=config.epsilon), np.zeros(len(inputs.rewards))
    for weight, values in inputs.parts or [(1.0, inputs.rewards)]:
        sums += weight * grpo_advantages(grpo, replace(inputs, rewards=values, parts=()))
    deviation = sums.std(ddof=1) if len(sums) > 1 else 0.0
    advantages: Floats = (sums - sums.mean()) / (deviation + config.epsilon)
    return advantages
