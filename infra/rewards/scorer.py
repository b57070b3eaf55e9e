"""Where a run's responses are scored."""

from collections.abc import Sequence
from typing import Protocol

from infra.rewards.pool import RewardPool
from rl_core.rewards import RewardFunction, RewardItem, RewardOutcome, load_reward, score_all
from schemas.config.reward import IsolatedReward, RewardConfig


class Scorer(Protocol):
    """Scores responses until it is closed."""

    def wait_until_ready(self) -> None:
        """Return once the reward function is loaded.

        Raises:
            RewardImportError: It can't be loaded.
        """

    def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """Return the items' outcomes, in order; a failed reward is an outcome that says why."""

    def close(self) -> None:
        """End what it has started."""


class LocalScorer:
    """Scores in this process: nothing stops a reward function that hangs or crashes.

    Args:
        function: The reward function.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def wait_until_ready(self) -> None:
        """Return at once."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """Return the items' outcomes, in order."""
        return score_all(self._function, items)

    def close(self) -> None:
        """Do nothing."""


def open_scorer(config: RewardConfig) -> Scorer:
    """Return the scorer of this config; processes load the reward function while the caller does something else.

    Raises:
        RewardImportError: The reward function can't be loaded here.
    """
    if not (isinstance(config, IsolatedReward) and config.needs_processes):
        return LocalScorer(load_reward(config))
    pool = RewardPool(config)
    pool.start()
    return pool
