"""Rewards computed in the process that generates."""

import asyncio
from collections.abc import Sequence

from infra.rewards.base import RewardBatch, RewardScorer
from rl_core.rewards import (
    AnyRewardFunction,
    RewardItem,
    RewardOutcome,
    is_concurrent,
    prepare,
    score_concurrently,
    score_one,
)


class LocalRewardScorer(RewardScorer):
    """Computes rewards in this process: nothing stops a reward function that hangs or crashes."""

    def __init__(self, function: AnyRewardFunction) -> None:
        self._function = function
        self._runner = asyncio.Runner()  # of all batches: a function may keep connections, which belong to its loop

    def wait_until_ready(self) -> None:
        self._runner.run(prepare(self._function))

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        return LocalRewardBatch(self._function, self._runner)

    def close(self) -> None:
        self._runner.close()


class LocalRewardBatch(RewardBatch):
    """A batch that is scored in this process item by item, or at the end if calls may overlap."""

    def __init__(self, function: AnyRewardFunction, runner: asyncio.Runner) -> None:
        self._function, self._runner = function, runner
        self._concurrent = is_concurrent(function)
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
        outcomes = self._runner.run(score_concurrently(self._function, list(self._waiting.values())))
        return self._outcomes | dict(zip(self._waiting, outcomes, strict=True))

    def close(self) -> None:
        """Do nothing: no call is open between two of the methods."""
