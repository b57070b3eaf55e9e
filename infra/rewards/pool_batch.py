"""A batch that reward processes score while the caller does something else."""

import threading
from collections.abc import Callable

from infra.rewards.base import RewardBatch
from infra.rewards.queue import RewardQueue
from rl_core.rewards import RewardItem, RewardOutcome


class PoolRewardBatch(RewardBatch):
    """One batch of a pool, and the thread that serves the pool's processes until the batch is done.

    Without the thread, a process that has answered would idle and a stuck one would keep running until the caller added
    its next item.

    Args:
        serve: Serves the pool's processes until a batch is over.
        release: Makes the pool ready for another batch.
    """

    def __init__(self, serve: Callable[[RewardQueue], None], release: Callable[[], None]) -> None:
        self._serve = serve
        self._release = release
        self._queue = RewardQueue()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._error: BaseException | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, number: int, item: RewardItem) -> None:
        """Submit an item; it goes at once to a process that can take it."""
        assert not self._closed, "the batch is finished or closed"
        self._raise_error()
        self._queue.add(number, item)

    def leave_out(self, number: int) -> None:
        """Do nothing: no other item waits for it."""

    def finish(self) -> dict[int, RewardOutcome]:
        """Wait for the remaining items, return every outcome by its item's number, and close."""
        assert not self._closed, "the batch is finished or closed"
        try:
            self._queue.finish()
            self._thread.join()
            self._raise_error()
            return self._queue.outcomes
        finally:
            self.close()

    def close(self) -> None:
        """Drop all items without an outcome, and replace the processes that are still scoring one."""
        if self._closed:
            return
        self._closed = True
        self._queue.abandon()
        self._thread.join()
        self._queue.close()
        self._release()

    def _run(self) -> None:
        try:
            self._serve(self._queue)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
