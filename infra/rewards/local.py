"""Rewards computed in the process that generates."""

import asyncio

from infra.rewards.base import RewardBatch, RewardScorer
from rl_core.rewards import RewardFunction, RewardItem, RewardOutcome, is_concurrent, score_all, score_one


class LocalRewardScorer(RewardScorer):
    """Computes rewards in this process: nothing stops a reward function that hangs or crashes.

    Args:
        function: The reward function.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def wait_until_ready(self) -> None:
        """Return at once."""

    def open_batch(self) -> RewardBatch:
        """Begin a batch."""
        return LocalRewardBatch(self._function)

    def close(self) -> None:
        """Do nothing."""


class LocalRewardBatch(RewardBatch):
    """A batch that is scored in this process item by item, or at the end if calls may overlap.

    Args:
        function: The reward function.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._concurrent = is_concurrent(function)
        self._runner = asyncio.Runner()
        self._waiting: dict[int, RewardItem] = {}
        self._outcomes: dict[int, RewardOutcome] = {}

    def add(self, number: int, item: RewardItem) -> None:
        """Score `item`, or keep it for the end if calls may overlap."""
        assert number not in (self._waiting if self._concurrent else self._outcomes), f"item {number} was added before"
        if self._concurrent:
            self._waiting[number] = item
        else:
            self._outcomes[number] = self._runner.run(score_one(self._function, item))

    def finish(self) -> dict[int, RewardOutcome]:
        """Make the calls that may overlap, and return all outcomes by number."""
        self.close()
        outcomes = score_all(self._function, list(self._waiting.values()))
        return self._outcomes | dict(zip(self._waiting, outcomes, strict=True))

    def close(self) -> None:
        """Make no further calls."""
        self._runner.close()
