"""A pool of processes that compute rewards: a reward that hangs or crashes costs one row, not the run.

Pebble's ProcessPool, which also kills workers after a time limit, can leave a task waiting forever if a limit expires
while its worker takes the next task (github.com/noxdafox/pebble/issues/153), and can't run two async calls at once.
"""

import logging
import math
import selectors
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from infra.rewards.base import RewardBatch, RewardScorer
from infra.rewards.pool_batch import PoolRewardBatch
from infra.rewards.process import RewardProcess
from infra.rewards.queue import RewardQueue
from rl_core.rewards import RewardOutcome
from schemas import errors
from schemas.config.reward_base import IsolatedReward
from schemas.errors import RewardImportError

logger = logging.getLogger(__name__)

READY_SECONDS = 300.0  # for importing the reward's module
POLL_SECONDS = 1.0  # between checks that a silent process is still alive
GRACE_SECONDS = 1.0  # added to the limit of concurrent calls, and given to a process that closed its socket to end

Loss = Literal["ended", "late"]


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
        """Wait until all processes have loaded the reward function, and can call it.

        Raises:
            RewardImportError: A process can't load it, or ended while loading it.
            UserError: It needs something that it lacks, such as a judge that responds.
        """
        assert self._batch is None, "an open batch does its own waiting"
        while any(process.concurrent is None for process in self._processes):
            self._wait()

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        """Begin a batch; the previous one must be finished or closed. Its items may be of any groups.

        An item fails if it has no answer within `timeout_seconds`, counted from when its process last responded, or if
        its process ends. The process is then replaced, and its other items are dispatched again. If several calls
        overlapped in a process that stops answering, each of them is retried on its own.
        """
        assert self._processes, "the pool isn't started, or is closed"
        assert self._batch is None, "a pool scores one batch at a time: finish or close the previous one"
        self._batch = PoolRewardBatch(self._serve, self._release)
        self._batch.start()
        return self._batch

    def close(self) -> None:
        """Drop the open batch, and kill all processes."""
        if self._batch is not None:
            self._batch.close()
        self._selector.close()
        _close_all(self._processes)

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [process.pid for process in self._processes]

    def _serve(self, queue: RewardQueue) -> None:
        """Have the processes score a batch until it is over."""
        self._selector.register(queue, selectors.EVENT_READ)
        try:
            queue.receive_arrivals()
            while not queue.is_over:
                self._dispatch(queue)
                self._wait(queue)
                queue.receive_arrivals()
        finally:
            self._selector.unregister(queue)

    def _release(self) -> None:
        """Replace the processes that are still scoring an item of a dropped batch."""
        self._batch = None
        for process in [process for process in self._processes if process.outstanding]:
            self._remove(process)
            self._add_process()

    def _dispatch(self, queue: RewardQueue) -> None:
        """Send the processes what they can take, the least busy one first."""
        least_busy_first = sorted(self._processes, key=lambda process: len(process.outstanding))
        receivers = [p for p in least_busy_first if queue.can_dispatch_to(p) and not p.has_died()]
        for num_left, process in zip(range(len(receivers), 0, -1), receivers, strict=True):
            queue.dispatch(process, num_left)

    def _add_process(self) -> None:
        process = RewardProcess(self._config)
        self._processes.append(process)
        self._selector.register(process, selectors.EVENT_READ)

    def _remove(self, process: RewardProcess) -> None:
        self._selector.unregister(process)
        self._processes.remove(process)
        process.close()

    def _wait(self, queue: RewardQueue | None = None) -> None:
        """Wait for an event or an expired limit; record the processes' answers, and replace those that are lost."""
        now = time.monotonic()
        ready = {key.fileobj for key, _ in self._selector.select(self._seconds_to_wait(now))}
        for process in list(self._processes):
            if process in ready:
                self._record(process, process.receive(), queue)
            reason = self._loss(process, process in ready, now)
            if reason is not None:
                self._replace(process, reason, queue)

    def _seconds_to_wait(self, now: float) -> float:
        limits = [process.last_active + self._limit(process) - now for process in self._processes]
        return max(0.0, min([POLL_SECONDS, *limits]))

    def _limit(self, process: RewardProcess) -> float:
        """Return for how many seconds the process may be silent."""
        if process.concurrent is None:
            return READY_SECONDS
        if not process.outstanding or self._config.timeout_seconds is None:
            return math.inf
        return self._config.timeout_seconds + (GRACE_SECONDS if process.concurrent else 0.0)

    def _loss(self, process: RewardProcess, ready: bool, now: float) -> Loss | None:
        """Return why a process is lost, or None.

        A process is late only if it was late at `now`, before a check for answers that found none: however late this
        thread itself runs, an answer that a process has sent counts.
        """
        if process.ended or (not ready and process.has_died()):
            return "ended"
        if not ready and now > process.last_active + self._limit(process):
            return "late"
        return None

    def _record(self, process: RewardProcess, answers: Iterable[dict[str, Any]], queue: RewardQueue | None) -> None:
        for answer in answers:
            if "error" in answer:
                raise getattr(errors, answer["type"])(answer["error"])
            if "concurrent" in answer:
                process.concurrent = answer["concurrent"]
                continue
            assert queue is not None, "an item was answered outside of a batch"
            queue.record(answer.pop("item"), RewardOutcome.from_json(answer))

    def _replace(self, process: RewardProcess, reason: Loss, queue: RewardQueue | None) -> None:
        how = process.kill(GRACE_SECONDS if reason == "ended" else 0.0)  # its socket closes a little before its end
        answers = process.receive()  # those sent before it was killed
        self._record(process, answers, queue)
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
        if queue is not None and process.outstanding:
            queue.requeue(process, outcome, was_scoring=reason == "ended" or not answers)
        self._add_process()


def _close_all(processes: list[RewardProcess]) -> None:
    for process in processes:
        process.close()
    processes.clear()
