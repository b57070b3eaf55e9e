"""Rewards of whole groups: a group function gets all responses to a prompt at once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from infra.rewards.base import RewardBatch, RewardScorer
from rl_core.rewards import RewardItem, RewardOutcome


class GroupRewardScorer(RewardScorer):
    """Has another scorer score groups, each as soon as its last response has arrived.

    Args:
        scorer: The scorer of the group function; closed with this one.
    """

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer

    def wait_until_ready(self) -> None:
        """Wait until the group function is loaded."""
        self._scorer.wait_until_ready()

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        """Begin a batch of items whose groups are these."""
        return GroupRewardBatch(self._scorer.open_batch(), groups)

    def close(self) -> None:
        """Close the other scorer."""
        self._scorer.close()


class GroupRewardBatch(RewardBatch):
    """A batch that keeps the items of a group until they are all there, but for those that are left out.

    Args:
        batch: Scores the groups, by their numbers.
        groups: N, the group of each item.
    """

    def __init__(self, batch: RewardBatch, groups: Sequence[int]) -> None:
        self._batch, self._groups = batch, groups
        self._sizes = Counter(groups)
        self._items: dict[int, dict[int, RewardItem]] = {group: {} for group in groups}

    def add(self, number: int, item: RewardItem) -> None:
        """Keep `item`, or submit its group if it is the last of it."""
        group = self._groups[number]
        items = self._items[group]
        assert number not in items, f"item {number} was added before"
        items[number] = item
        self._submit_if_complete(group)

    def leave_out(self, number: int) -> None:
        """Have the group scored without item `number`."""
        group = self._groups[number]
        self._sizes[group] -= 1
        self._submit_if_complete(group)

    def _submit_if_complete(self, group: int) -> None:
        items = [item for _, item in sorted(self._items[group].items())]
        if not items or len(items) < self._sizes[group]:
            return
        completions = [str(item.completion) for item in items]
        samples = {"samples": [item.trajectory for item in items]} if items[0].trajectory else {}
        self._batch.add(group, replace(items[0], completion=completions, trajectory=samples))

    def finish(self) -> dict[int, RewardOutcome]:
        """Wait for the remaining groups, and return the outcome of every item: that of its group, if it failed."""
        missing = [group for group, items in self._items.items() if len(items) < self._sizes[group]]
        assert not missing, f"groups {missing} lack responses"
        outcomes = self._batch.finish()
        return {
            number: outcome
            for group, items in self._items.items()
            if items
            for number, outcome in zip(
                sorted(items), outcomes[group].group or (outcomes[group],) * len(items), strict=True
            )
        }

    def close(self) -> None:
        """Drop all groups without an outcome."""
        self._batch.close()
