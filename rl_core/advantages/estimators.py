"""Advantage estimators: a new one is a config variant, a module and a line in `_ESTIMATORS`."""

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.base import AdvantageEstimator, AdvantageInputs, Floats, Ints
from rl_core.advantages.dr_grpo import dr_grpo_advantages
from rl_core.advantages.grpo import grpo_advantages
from rl_core.advantages.opo import opo_advantages
from rl_core.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline_advantages
from rl_core.advantages.rloo import rloo_advantages
from schemas.config.advantage import AdvantageConfig

__all__ = ["compute_advantages"]

_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_advantages,
    "opo": opo_advantages,
}


def compute_advantages(
    rewards: Floats, group_ids: Ints, config: AdvantageConfig, *, response_lengths: Ints, loss_tokens: Ints
) -> NDArray[np.float32]:
    """Compute the advantage of each of N rows with the estimator of the config's `kind`.

    A zero-variance group (equal rewards, or one row) doesn't say which response is better: whatever the estimator
    returns, its advantages are exactly 0.

    Args:
        rewards: [N] finite; drop the rows whose reward failed.
        group_ids: [N] the same number for all rows of a prompt; they need not be adjacent.
        config: The estimator and its parameters.
        response_lengths: [N] tokens.
        loss_tokens: [N] trained response tokens.

    Returns:
        [N] float32.

    Raises:
        ValueError: The arrays differ in length, a reward isn't finite, or counts are impossible.
    """
    inputs = AdvantageInputs.from_rows(rewards, group_ids, response_lengths=response_lengths, loss_tokens=loss_tokens)
    if not len(inputs.rewards):
        return np.empty(0, dtype=np.float32)
    advantages = _ESTIMATORS[config.kind](inputs, config)
    return np.where(inputs.zero_variance, 0.0, advantages).astype(np.float32)
