"""The registry of advantage estimators: a new one is a config class, a function and a line in `ESTIMATORS`."""

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.base import AdvantageInputs, Floats, Ints, Parts
from rl_core.advantages.baselines import (
    dr_grpo_advantages,
    gdpo_advantages,
    grpo_advantages,
    max_rl_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from rl_core.advantages.turn_level import turn_level_advantages
from rl_core.registry import Registry, entry
from schemas.config.advantage import (
    AdvantageConfig,
    DrGrpoAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
    TurnLevelAdvantage,
)

__all__ = ["ESTIMATORS", "compute_advantages"]

ESTIMATORS: Registry[[AdvantageInputs], Floats] = Registry(
    "rl_core.advantages.estimators.ESTIMATORS",
    AdvantageConfig,
    entry(GrpoAdvantage, grpo_advantages),
    entry(DrGrpoAdvantage, dr_grpo_advantages),
    entry(RlooAdvantage, rloo_advantages),
    entry(ReinforcePlusPlusAdvantage, reinforce_plus_plus_baseline_advantages),
    entry(OpoAdvantage, opo_advantages),
    entry(TurnLevelAdvantage, turn_level_advantages),
    entry(MaxRlAdvantage, max_rl_advantages),
    entry(GdpoAdvantage, gdpo_advantages),
)
"""Advantage estimators: (config, inputs of N rows) -> [N] float64.

An estimator need not handle zero-variance groups: `estimate` sets their advantages to 0 afterwards. It must
only return some number for them without an error.
"""


def compute_advantages(
    rewards: Floats,
    group_ids: Ints,
    config: AdvantageConfig,
    *,
    response_lengths: Ints,
    loss_tokens: Ints,
    parts: Parts = (),
) -> NDArray[np.float32]:
    """Compute the advantage of each of N rows with the estimator of the config's `kind`: [N] float32.

    A zero-variance group (equal rewards, or one row) doesn't say which response is better: whatever the estimator
    returns, its advantages are exactly 0.

    Args:
        rewards: [N] finite; drop the rows whose reward failed.
        group_ids: [N] the same number for all rows of a prompt; they need not be adjacent.
        config: The estimator and its parameters.
        response_lengths: [N] tokens.
        loss_tokens: [N] trained response tokens.
        parts: The weight and the values, [N] finite, of each part of the rewards, for an estimator that looks at
            them one by one; a zero-variance group is then one in which each part is equal.

    Raises:
        ValueError: The arrays differ in length, a reward isn't finite, or counts are impossible.

    Example:
        >>> rewards, groups, tokens = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1]), np.array([5, 9, 4, 4])
        >>> compute_advantages(rewards, groups, DrGrpoAdvantage(), response_lengths=tokens, loss_tokens=tokens).tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    inputs = AdvantageInputs.from_rows(
        rewards, group_ids, response_lengths=response_lengths, loss_tokens=loss_tokens, parts=parts
    )
    return estimate(config, inputs)


def estimate(config: AdvantageConfig, inputs: AdvantageInputs) -> NDArray[np.float32]:
    """Compute the advantages of validated rows, [N]; see `compute_advantages`."""
    if not len(inputs.rewards):
        return np.empty(0, dtype=np.float32)
    advantages = ESTIMATORS(config, inputs)
    return np.where(inputs.zero_variance, 0.0, advantages).astype(np.float32)
