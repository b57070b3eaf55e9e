"""Advantage estimators: a new one is a config variant, a module and a line in `_ESTIMATORS`."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.grpo import grpo_advantages
from schemas.config.advantage import AdvantageConfig

__all__ = ["compute_advantages"]

_ESTIMATORS: dict[str, Callable[..., NDArray[np.float32]]] = {"grpo": grpo_advantages}


def compute_advantages(
    rewards: NDArray[np.float64], group_ids: NDArray[np.int64], config: AdvantageConfig
) -> NDArray[np.float32]:
    """The advantage of each row, by the config's `kind`.

    Args:
        rewards: [N] finite rewards.
        group_ids: [N] which rows answer the same prompt.
        config: Which estimator, with its parameters.

    Returns:
        [N] float32.
    """
    return _ESTIMATORS[config.kind](rewards, group_ids, config)
