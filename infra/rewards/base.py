"""What scores a run's responses, and one batch of them that is being scored."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rl_core.rewards import RewardItem, RewardOutcome


class RewardBatch(ABC):
    """One batch: items go in as they come to be, outcomes come out at the end.

    As a context manager it is closed on leaving, which drops a batch that isn't finished.
    """

    @abstractmethod
    def add(self, number: int, item: RewardItem) -> None:
        """Have `item` scored; its outcome will be that of `number`, which is given once.

        Raises:
            RewardImportError: A process that replaces another can't load the reward function.
        """

    @abstractmethod
    def finish(self) -> dict[int, RewardOutcome]:
        """Wait for the rest; return every outcome by its item's number, and close.

        A failed reward is an outcome that says why.

        Raises:
            RewardImportError: As `add` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop what has no outcome yet; nothing of it reaches a later batch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RewardScorer(ABC):
    """Scores responses until it is closed."""

    @abstractmethod
    def wait_until_ready(self) -> None:
        """Return once the reward function is loaded.

        Raises:
            RewardImportError: It can't be loaded.
        """

    @abstractmethod
    def open_batch(self) -> RewardBatch:
        """Begin a batch; the one before must be finished or closed."""

    @abstractmethod
    def close(self) -> None:
        """End what it has started."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """Return the items' outcomes, in order.

        Raises:
            RewardImportError: As `RewardBatch.add` does.
        """
        with self.open_batch() as batch:
            for number, item in enumerate(items):
                batch.add(number, item)
            outcomes = batch.finish()
        return [outcomes[number] for number in range(len(items))]
