"""Rewards of whole groups, and weighted sums with reward models.

A group function gets all responses to a prompt at once; the rewards of models are computed elsewhere than those of the
other parts of a sum.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from infra.rewards.base import RewardBatch, RewardScorer
from rl_core.rewards import RewardItem, RewardOutcome
from rl_core.rewards.outcome import finite_number

REMAINDER = "reward"  # the sum of the other parts, under a name that no part can have


class GroupRewardScorer(RewardScorer):
    """Has another scorer score groups, each as soon as its last response has arrived.

    Args:
        scorer: The scorer of the group function; closed with this one.
        by_prompt: Whether responses to different prompts, as environments may make of a row's, are groups of their own.
    """

    def __init__(self, scorer: RewardScorer, *, by_prompt: bool = False) -> None:
        self._scorer, self._by_prompt = scorer, by_prompt

    def wait_until_ready(self) -> None:
        self._scorer.wait_until_ready()

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        return GroupRewardBatch(self._scorer.open_batch(), groups, by_prompt=self._by_prompt)

    def close(self) -> None:
        self._scorer.close()


class GroupRewardBatch(RewardBatch):
    """A batch that keeps the items of a group until they are all there, but for those that are left out.

    Args:
        batch: Scores the groups, by their numbers.
        groups: N, the group of each item.
        by_prompt: See `GroupRewardScorer`.
    """

    def __init__(self, batch: RewardBatch, groups: Sequence[int], *, by_prompt: bool = False) -> None:
        self._batch, self._groups, self._by_prompt = batch, groups, by_prompt
        self._submitted: list[list[int]] = []  # the items of each call, whose number is that of its first item
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
        items = self._items[group]
        if not items or len(items) < self._sizes[group]:
            return
        calls: dict[str, list[int]] = {}
        for number, item in sorted(items.items()):
            calls.setdefault(item.prompt if self._by_prompt else "", []).append(number)
        for numbers in calls.values():
            first, *_ = members = [items[number] for number in numbers]
            completions = [str(item.completion) for item in members]
            samples = {"samples": [item.trajectory for item in members]} if first.trajectory else {}
            self._batch.add(numbers[0], replace(first, completion=completions, trajectory=samples))
            self._submitted.append(numbers)

    def finish(self) -> dict[int, RewardOutcome]:
        """Wait for the remaining groups, and return the outcome of every item: that of its call, if it failed."""
        missing = [group for group, items in self._items.items() if len(items) < self._sizes[group]]
        assert not missing, f"groups {missing} lack responses"
        outcomes = self._batch.finish()
        return {
            number: outcome
            for numbers in self._submitted
            for number, outcome in zip(
                numbers, outcomes[numbers[0]].group or (outcomes[numbers[0]],) * len(numbers), strict=True
            )
        }

    def close(self) -> None:
        self._batch.close()


class SumRewardScorer(RewardScorer):
    """Has several scorers score each response at the same time, and adds up what they return.

    Args:
        scorers: The scorer of each reward model, by the name of its part, and that of the sum of all other parts as
            `REMAINDER`, if there are any; closed with this one.
        weights: The weight of each model.
    """

    def __init__(self, scorers: Mapping[str, RewardScorer], weights: Mapping[str, float]) -> None:
        self._scorers, self._weights = dict(scorers), dict(weights)

    def wait_until_ready(self) -> None:
        for scorer in self._scorers.values():
            scorer.wait_until_ready()

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        with ExitStack() as opened:
            batches = {name: opened.enter_context(scorer.open_batch(groups)) for name, scorer in self._scorers.items()}
            opened.pop_all()
        return SumRewardBatch(batches, self._weights)

    def close(self) -> None:
        with ExitStack() as closing:
            for scorer in self._scorers.values():
                closing.callback(scorer.close)


class SumRewardBatch(RewardBatch):
    """A batch of each scorer, with the same items.

    Args:
        batches: By name; see `SumRewardScorer`.
        weights: Of the models.
    """

    def __init__(self, batches: Mapping[str, RewardBatch], weights: Mapping[str, float]) -> None:
        self._batches, self._weights = batches, weights

    def add(self, number: int, item: RewardItem) -> None:
        for batch in self._batches.values():
            batch.add(number, item)

    def leave_out(self, number: int) -> None:
        for batch in self._batches.values():
            batch.leave_out(number)

    def finish(self) -> dict[int, RewardOutcome]:
        found = {name: batch.finish() for name, batch in self._batches.items()}
        numbers = next(iter(found.values()))
        return {
            number: _add_up({name: outcomes[number] for name, outcomes in found.items()}, self._weights)
            for number in numbers
        }

    def close(self) -> None:
        with ExitStack() as closing:
            for batch in self._batches.values():
                closing.callback(batch.close)


def _add_up(outcomes: Mapping[str, RewardOutcome], weights: Mapping[str, float]) -> RewardOutcome:
    """Return the weighted sum of a response's rewards, with each as a part; a failure if one failed."""
    total, parts = 0.0, dict[str, float]()
    for name, outcome in outcomes.items():
        if outcome.reward is None:
            failure = outcome.failure if name == REMAINDER else f"RuntimeError: part {name!r} failed: {outcome.failure}"
            return RewardOutcome(reward=None, failure=failure)
        total += outcome.reward if name == REMAINDER else weights[name] * outcome.reward
        added = outcome.parts if name == REMAINDER else {name: outcome.reward}  # a model's score has no parts
        if twice := sorted(parts.keys() & added):
            return RewardOutcome(
                reward=None, failure=f"RuntimeError: two parts are named {twice[0]!r}: rename one of them"
            )
        parts |= added
    try:
        return RewardOutcome(finite_number("the weighted sum", total), parts)
    except ValueError as error:
        return RewardOutcome.failed(error)
