"""Advantages of single turns. N rows, M turns of all rows, row by row."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.base import AdvantageInputs, Floats, Ints
from rl_core.advantages.baselines import grpo_advantages
from schemas.config.advantage import GrpoAdvantage, TurnLevelAdvantage


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of N rows."""

    counts: Ints  # [N], of each row, at least 1
    rewards: Floats  # [M], the part of the row's reward that each has

    def take(self, rows: Ints) -> "Turns":
        """Return the turns of some rows, ascending."""
        is_taken = np.zeros(len(self.counts), dtype=bool)
        is_taken[rows] = True
        return Turns(self.counts[rows], self.rewards[np.repeat(is_taken, self.counts)])


def turn_level_advantages(config: TurnLevelAdvantage, inputs: AdvantageInputs) -> Floats:
    """Compute the advantages of first turns, which are GRPO's of the trajectories, [N] float64."""
    return grpo_advantages(GrpoAdvantage(epsilon=config.epsilon), inputs)


def advantages_of_turns(config: TurnLevelAdvantage, inputs: AdvantageInputs, turns: Turns) -> NDArray[np.float32]:
    """Compute (return - mean return of the group's turns of the same number) / (std of the group's rewards + epsilon).

    The return of a turn is the sum of its row's rewards from it on, as in process supervision of Shao et al. 2024
    (arXiv:2402.03300, section 4.1.3), with a baseline for each turn, as of Zeng et al. 2025 (arXiv:2505.11821). What a
    row's reward has besides its turns' is the last turn's, so that the return of the first turn is the reward.

    A baseline is over the rows that have this turn; what a row's turn does can't change who is among them. All turns
    have the divisor of the first one: a divisor of their own would weigh late turns by how few rows have them, which
    the policy decides. A turn that a single row has gets 0, and so do all turns of a zero-variance group.

    They are [M] float32; of rows of one turn, GRPO's.
    """
    row = np.repeat(np.arange(len(turns.counts)), turns.counts)
    ends = np.cumsum(turns.counts)
    starts = ends - turns.counts
    rewards = turns.rewards.copy()
    rewards[ends - 1] += inputs.rewards - np.add.reduceat(turns.rewards, starts)
    total = np.concatenate([[0.0], np.cumsum(rewards)])
    returns = total[ends][row] - total[:-1]
    returns[starts] = inputs.rewards  # exactly, whatever the sums' rounding
    number = np.arange(len(row)) - starts[row]
    key = inputs.group[row] * (int(turns.counts.max()) + 1) + number
    same, index = np.unique(key, return_inverse=True)
    baseline = np.bincount(index, weights=returns, minlength=len(same)) / np.bincount(index, minlength=len(same))
    variance = np.bincount(inputs.group, weights=inputs.centered**2) / np.maximum(inputs.group_sizes - 1, 1)
    advantages = (returns - baseline[index]) / (np.sqrt(variance) + config.epsilon)[inputs.group[row]]
    return np.where(inputs.zero_variance[row], 0.0, advantages).astype(np.float32)
