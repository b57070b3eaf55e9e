"""The interfaces of reward scoring: a scorer, and one batch of responses that it scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rl_core.rewards import RewardItem, RewardOutcome


class RewardBatch(ABC):
    """One batch: items are added as responses arrive, and all outcomes are returned at the end.

    As a context manager, it closes on exit, which drops a batch that is not finished.
    """

    @abstractmethod
    def add(self, number: int, item: RewardItem) -> None:
        """Submit `item`; its outcome will be returned under `number`, which must be new.

        Raises:
            UserError: A replacement process can't load the reward function, or what that needs doesn't respond.
        """

    def leave_out(self, number: int) -> None:  # noqa: B027
        """Note that there is no item `number`: it gets no outcome, and no other waits for it."""

    @abstractmethod
    def finish(self) -> dict[int, RewardOutcome]:
        """Wait for the remaining items, return every outcome by its item's number, and close.

        A failed reward is an outcome that says why.

        Raises:
            UserError: See `add`.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop all items without an outcome; none of them affects a later batch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RewardScorer(ABC):
    """Computes the rewards of responses until it is closed."""

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Wait until the reward function is loaded and can be called.

        Raises:
            RewardImportError: It can't be loaded.
            UserError: It needs something that it lacks, such as a judge that responds.
        """

    @abstractmethod
    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        """Begin a batch; the previous one must be finished or closed.

        Args:
            groups: The group of each item, by the item's number; only a group function needs it.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop everything that the scorer has started."""

    def score(self, items: Sequence[RewardItem], groups: Sequence[int] = ()) -> list[RewardOutcome]:
        """Return the items' outcomes, in order.

        Args:
            items: N items.
            groups: N, or none; see `open_batch`.

        Raises:
            UserError: See `RewardBatch.add`.
        """
        with self.open_batch(groups) as batch:
            for number, item in enumerate(items):
                batch.add(number, item)
            outcomes = batch.finish()
        return [outcomes[number] for number in range(len(items))]
