"""Group-relative advantages. N rows, G groups."""

import numpy as np
from numpy.typing import NDArray

from schemas.config.advantage import GrpoAdvantage


def grpo_advantages(
    rewards: NDArray[np.float64], group_ids: NDArray[np.int64], config: GrpoAdvantage
) -> NDArray[np.float32]:
    """(reward - group mean) / (group sample standard deviation + epsilon).

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2. A group of one row, or of equal rewards, says nothing
    about which response is better: its advantages are exactly 0.

    Args:
        rewards: [N] finite rewards; leave out the rows whose reward failed.
        group_ids: [N] which rows answer the same prompt; the rows of a group need not be adjacent.
        config: Its `epsilon` is added to the standard deviation (ddof = 1).

    Returns:
        [N] float32.

    Raises:
        ValueError: The arrays differ in length, or a reward isn't finite.
    """
    scores, groups = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    if scores.shape != groups.shape or scores.ndim != 1:
        raise ValueError(f"rewards and group_ids must be 1-D of one length, not {scores.shape} and {groups.shape}")
    if len(wrong := np.flatnonzero(~np.isfinite(scores))):
        raise ValueError(f"row {wrong[0]} has reward {scores[wrong[0]]}; leave out rows whose reward failed")
    if not len(scores):
        return np.empty(0, dtype=np.float32)
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    centred = scores - (np.bincount(group, weights=scores) / counts)[group]
    variance = np.bincount(group, weights=centred**2) / np.maximum(counts - 1, 1)
    # The mean of n equal floats isn't always that float: such a group's variance need not be 0.
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, group, scores)
    np.maximum.at(highest, group, scores)
    advantages = centred / (np.sqrt(variance) + config.epsilon)[group]
    return np.where((lowest == highest)[group], 0.0, advantages).astype(np.float32)
