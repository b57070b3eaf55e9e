"""Processes that score responses: a reward that hangs or crashes costs one row, not the run.

Pebble's ProcessPool, which also ends workers after a time limit, can leave a task waiting for ever when a limit expires
while its worker takes the next task (github.com/noxdafox/pebble/issues/153), and runs no two async calls at once.
"""

import logging
import math
import selectors
import time
import weakref
from collections.abc import Iterable
from typing import Any

from infra.rewards.base import RewardBatch, RewardScorer
from infra.rewards.pool_batch import PoolRewardBatch
from infra.rewards.process import RewardProcess
from infra.rewards.queue import RewardQueue
from rl_core.rewards import RewardOutcome
from schemas.config.reward import IsolatedReward
from schemas.errors import RewardImportError

logger = logging.getLogger(__name__)

READY_SECONDS = 300.0  # for importing the reward's module
POLL_SECONDS = 1.0  # between looks at whether a silent process is still there
GRACE_SECONDS = 1.0  # for concurrent calls, which are first ended from within


class RewardPool(RewardScorer):
    """The reward processes of one rollout worker.

    Args:
        config: The reward, its time limit and its number of processes.
    """

    def __init__(self, config: IsolatedReward) -> None:
        self._config = config
        self._processes: list[RewardProcess] = []
        self._selector = selectors.DefaultSelector()
        self._batch: PoolRewardBatch | None = None
        weakref.finalize(self, _close_all, self._processes)  # with the pool, or at the latest with this process

    def start(self) -> None:
        """Start the processes, without waiting until they have loaded the reward function."""
        for _ in range(self._config.num_processes):
            self._add_process()

    def wait_until_ready(self) -> None:
        """Return once all processes have loaded the reward function.

        Raises:
            RewardImportError: One can't, or ended while it did.
        """
        assert self._batch is None, "a batch at work waits by itself"
        while any(process.concurrent is None for process in self._processes):
            self._wait()

    def open_batch(self) -> RewardBatch:
        """Begin a batch; the one before must be finished or closed.

        An item that has no answer within `timeout_seconds`, counted from when its process was last heard from, or whose
        process ends, is a failure; the process is replaced, and the other items are handed out again. Of several
        concurrent calls in a process that stops answering, each is made again on its own.
        """
        assert self._processes, "the pool isn't started, or is closed"
        assert self._batch is None, "a pool scores one batch at a time: finish or close the one before"
        self._batch = PoolRewardBatch(self._serve, self._release)
        self._batch.start()
        return self._batch

    def close(self) -> None:
        """Drop the batch at work, and end all processes."""
        if self._batch is not None:
            self._batch.close()
        self._selector.close()
        _close_all(self._processes)

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [process.pid for process in self._processes]

    def _serve(self, work: RewardQueue) -> None:
        """Have the processes score a batch until it is over."""
        self._selector.register(work, selectors.EVENT_READ)
        try:
            work.take_arrivals()
            while not work.is_over:
                self._hand_out(work)
                self._wait(work)
                work.take_arrivals()
        finally:
            self._selector.unregister(work)

    def _release(self) -> None:
        """Replace the processes that are still at an item of a batch that was dropped."""
        self._batch = None
        for process in [process for process in self._processes if process.outstanding]:
            self._remove(process)
            self._add_process()

    def _hand_out(self, work: RewardQueue) -> None:
        """Give the processes what they can take, the least busy one first."""
        least_busy_first = sorted(self._processes, key=lambda process: len(process.outstanding))
        takers = [process for process in least_busy_first if work.may_take(process) and not process.has_died()]
        for num_left, process in zip(range(len(takers), 0, -1), takers, strict=True):
            work.hand_out(process, num_left)

    def _add_process(self) -> None:
        process = RewardProcess(self._config)
        self._processes.append(process)
        self._selector.register(process, selectors.EVENT_READ)

    def _remove(self, process: RewardProcess) -> None:
        self._selector.unregister(process)
        self._processes.remove(process)
        process.close()

    def _wait(self, work: RewardQueue | None = None) -> None:
        """Wait until something happens or a process is overdue; take its answers, and replace those that are lost."""
        now = time.monotonic()
        ready = {key.fileobj for key, _ in self._selector.select(self._seconds_to_wait(now))}
        for process in list(self._processes):
            if process in ready:
                self._take(process, process.receive(), work)
            reason = self._loss(process, process in ready, now)
            if reason is not None:
                self._replace(process, reason, work)

    def _seconds_to_wait(self, now: float) -> float:
        limits = [process.heard_at + self._limit(process) - now for process in self._processes]
        return max(0.0, min([POLL_SECONDS, *limits]))

    def _limit(self, process: RewardProcess) -> float:
        """How many seconds a process may be silent."""
        if process.concurrent is None:
            return READY_SECONDS
        if not process.outstanding or self._config.timeout_seconds is None:
            return math.inf
        return self._config.timeout_seconds + (GRACE_SECONDS if process.concurrent else 0.0)

    def _loss(self, process: RewardProcess, ready: bool, now: float) -> str | None:
        """Why a process is lost, or None.

        It is late if it was so at `now`, before a look for answers that found none: however late this thread itself
        is, what a process has answered counts.
        """
        if process.ended or (not ready and process.has_died()):
            return "ended"
        if not ready and now > process.heard_at + self._limit(process):
            return "late"
        return None

    def _take(self, process: RewardProcess, answers: Iterable[dict[str, Any]], work: RewardQueue | None) -> None:
        for answer in answers:
            if "error" in answer:
                raise RewardImportError(answer["error"])
            if "concurrent" in answer:
                process.concurrent = answer["concurrent"]
                continue
            assert work is not None, "an answer to nothing that was asked"
            work.settle(answer["item"], RewardOutcome(answer["reward"], answer["parts"], answer["failure"]))

    def _replace(self, process: RewardProcess, reason: str, work: RewardQueue | None) -> None:
        how = process.kill()
        answers = process.receive()  # what it said before it was ended
        self._take(process, answers, work)
        self._remove(process)
        if process.concurrent is None:
            what = f"ended with {how}" if reason == "ended" else f"took more than {READY_SECONDS:g} s"
            raise RewardImportError(f"a reward process {what} while it loaded the reward function")
        failure = f"RewardProcessError: the reward's process ended with {how}"
        limit = self._config.timeout_seconds
        outcome = (
            RewardOutcome(reward=None, failure=failure)
            if reason == "ended" or limit is None
            else RewardOutcome.timed_out(limit)
        )
        logger.warning("reward process %d is replaced: %s", process.pid, outcome.failure)
        if work is not None and process.outstanding:
            work.lose(process, outcome, blame=reason == "ended" or not answers)
        self._add_process()


def _close_all(processes: list[RewardProcess]) -> None:
    for process in processes:
        process.close()
    processes.clear()
