"""A pool of processes that compute rewards: a reward that hangs or crashes costs one row, not the run.

Pebble's ProcessPool, which also kills workers after a time limit, can leave a task waiting forever if a limit expires
while its worker takes the next task (github.com/noxdafox/pebble/issues/153), and can't run two async calls at once.
"""

import json
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra.processes.calls import Running
from infra.processes.isolated import IsolatedProcess
from infra.processes.slot import MAX_HUNG, LossKind, ProcessCall, Slot, close_all, serve, wait_until_ready
from infra.rewards.base import RewardBatch, RewardScorer
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.reward import user_functions
from schemas.config.reward_base import IsolatedReward
from schemas.errors import RewardImportError

# Not multiprocessing's spawn: it would import the parent's __main__, which is Ray's worker, and with it Ray.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from infra.rewards.child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
SHARES_PER_PROCESS = 4  # of the items that wait: what a process takes ahead, to balance those that take different times
MAX_AHEAD = 16


@dataclass(eq=False, kw_only=True)
class RewardCall(ProcessCall):
    """An item to score."""

    item: RewardItem


class RewardSlot(Slot[RewardCall]):
    """A process that loads a reward function and scores items, or its replacement.

    Args:
        config: The reward.
        waiting: The items of the pool's batch that are to be sent.
        outcomes: Takes the batch's outcomes by their items' numbers.
    """

    kind, loading, load_error = "reward", "loaded the reward function", RewardImportError

    def __init__(self, config: IsolatedReward, waiting: deque[RewardCall], outcomes: dict[int, RewardOutcome]) -> None:
        path = json.dumps([folder or os.getcwd() for folder in sys.path])
        is_first = iter([True])  # a judge that is busy when a process is replaced would else end the run

        def start() -> IsolatedProcess:
            settings = pickle.dumps((config, next(is_first, False)))
            return IsolatedProcess([sys.executable, "-P", "-c", PROGRAM], [path], settings)

        super().__init__(
            ", ".join(each.path for each in user_functions(config)) or type(config).__name__, start, waiting
        )
        self._num_processes, self._outcomes = config.num_processes, outcomes

    def _has_room(self) -> bool:
        """Return whether the process takes another item: any number if calls may overlap, else few ahead."""
        if self.process.ready is None:
            return False
        share = len(self._waiting) // (SHARES_PER_PROCESS * self._num_processes)
        return self.process.ready["is_concurrent"] or len(self.sent) < max(1, min(share, MAX_AHEAD))

    def _message(self, call: RewardCall) -> bytes:
        return pickle.dumps((call.number, call.item))

    def _answer(self, call: RewardCall | None, answer: dict[str, Any]) -> None:
        assert call is not None, "an item was answered that was not sent"
        self._outcomes[call.number] = RewardOutcome.from_json(answer)

    def _fail(self, call: RewardCall, kind: LossKind, message: str, running: Running, now: float) -> None:
        error = "TimeoutError" if kind == "timeout" else "RewardProcessError"
        self._outcomes[call.number] = RewardOutcome(reward=None, failure=f"{error}: {message}")


class PoolRewardBatch(RewardBatch):
    """One batch of a pool, and the thread that serves the pool's processes until the batch is done.

    Without the thread, a process that has answered would idle and a stuck one would keep running until the caller added
    its next item.

    Args:
        pool: The pool, which has no other batch.
    """

    def __init__(self, pool: "RewardPool") -> None:
        self._pool = pool
        self._numbers: set[int] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_complete = self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def add(self, number: int, item: RewardItem) -> None:
        """Submit an item; it goes at once to a process that can take it."""
        assert not self._is_closed, "the batch is finished or closed"
        self._raise_error()
        assert number not in self._numbers, f"item {number} was added before"
        self._numbers.add(number)
        self._pool.waiting.append(RewardCall(number=number, item=item))
        os.eventfd_write(self._wake, 1)

    def finish(self) -> dict[int, RewardOutcome]:
        assert not self._is_closed, "the batch is finished or closed"
        try:
            self._is_complete = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._raise_error()
            return dict(self._pool.outcomes)
        finally:
            self.close()

    def close(self) -> None:
        """Drop all items without an outcome, and replace the processes that are still scoring one."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._pool.release()

    def _run(self) -> None:
        try:
            while not (self._is_closed or (self._is_complete and self._pool.is_idle)):
                serve(self._pool.slots, wake=self._wake)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class RewardPool(RewardScorer):
    """The reward processes of one rollout worker.

    Args:
        config: The reward, its time limit and its number of processes.

    Attributes:
        slots: The processes.
        waiting: The items of the batch that no process has; its caller's thread adds some, its own takes them.
        outcomes: Those of the batch by their items' numbers.
    """

    def __init__(self, config: IsolatedReward) -> None:
        self._config = config
        self.slots: list[RewardSlot] = []
        self.waiting: deque[RewardCall] = deque()
        self.outcomes: dict[int, RewardOutcome] = {}
        self._batch: PoolRewardBatch | None = None
        weakref.finalize(self, close_all, self.slots)  # with the pool, or at the latest with this process

    def start(self) -> None:
        """Start the processes, without waiting until they have loaded the reward function."""
        for _ in range(self._config.num_processes):
            self.slots.append(RewardSlot(self._config, self.waiting, self.outcomes))

    def wait_until_ready(self) -> None:
        assert self._batch is None, "an open batch does its own waiting"
        wait_until_ready(self.slots)

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        """Begin a batch; the previous one must be finished or closed. Its items may be of any groups.

        An item fails if its call takes longer than `timeout_seconds`, or if it ends its process twice. The process is
        then replaced, and its other items are dispatched again.
        """
        assert self.slots, "the pool isn't started, or is closed"
        assert self._batch is None, "a pool scores one batch at a time: finish or close the previous one"
        self._batch = PoolRewardBatch(self)
        return self._batch

    def close(self) -> None:
        if self._batch is not None:
            self._batch.close()
        close_all(self.slots)

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [slot.process.pid for slot in self.slots]

    @property
    def is_idle(self) -> bool:
        """Whether no item lacks an outcome."""
        return not self.waiting and not any(slot.sent for slot in self.slots)

    def release(self) -> None:
        """Forget the batch, and replace the processes that still score an item of it, or have many hung threads."""
        self._batch = None
        self.waiting.clear()
        self.outcomes.clear()
        for slot in self.slots:
            if slot.sent or slot.num_hung >= MAX_HUNG:
                slot.restart()
