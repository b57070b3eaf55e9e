"""Rewards that the run's reward workers compute, as a rollout worker asks for them."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from threading import Lock
from typing import Any

from infra.ray.actors import call
from infra.rewards.base import RewardBatch, RewardScorer
from infra.rewards.open import OpenModel
from infra.workers.launch import get_worker
from infra.workers.layout import reward_workers
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.errors import WorkerLostError
from schemas.step import RunHandle

CALLS_PER_WORKER = 2  # at a time, so that a worker has the next group when it has scored one
MAX_LOSSES = 3  # of workers, for one group

logger = logging.getLogger(__name__)


def model_opener(run: RunHandle, first: int) -> OpenModel:
    """Return what opens the scorers of the run's reward models; see `WorkerRewardScorer`."""
    of_each = iter(reward_workers(run.config))
    return lambda _: WorkerRewardScorer(run, next(of_each), first)


class WorkerRewardScorer(RewardScorer):
    """Has reward workers score groups, each as soon as it is added, while the caller generates others.

    A worker that dies is created again, and scores its groups again: the outcomes are the same.

    Args:
        run: The run.
        workers: The numbers of the reward workers that hold one model.
        first: Which of them gets the first group: another one for each rollout worker.
    """

    def __init__(self, run: RunHandle, workers: Sequence[int], first: int) -> None:
        self._run, self._workers = run, workers
        self._found: dict[int, Any] = {}  # handles by number, of which one thread at a time finds one
        self._lock = Lock()
        self._turns = count(first)
        self._threads = ThreadPoolExecutor(CALLS_PER_WORKER * len(workers), thread_name_prefix="rewards")

    def wait_until_ready(self) -> None:
        """Do nothing: the driver starts the workers."""

    def open_batch(self, groups: Sequence[int] = ()) -> RewardBatch:
        """Begin a batch, whose items are whole groups."""
        return WorkerRewardBatch(self)

    def close(self) -> None:
        """Wait for the calls that are open; the workers go on."""
        self._threads.shutdown(cancel_futures=True)

    def submit(self, item: RewardItem) -> "Future[RewardOutcome]":
        """Have the next worker score all responses to a prompt; its future raises what `infra.ray.actors.call` does."""
        number = self._workers[next(self._turns) % len(self._workers)]
        return self._threads.submit(self._score, number, item)

    def _score(self, number: int, item: RewardItem) -> RewardOutcome:
        worker: Any = None
        for num_losses in count(1):
            try:
                worker = self._find(number, worker)
                outcome: RewardOutcome = asyncio.run(call(worker, "score", item))
            except WorkerLostError as error:
                if num_losses == MAX_LOSSES:
                    raise
                logger.warning("reward worker %d is lost, and created again: %s", number, error)
            else:
                return outcome
        raise AssertionError("unreachable")

    def _find(self, number: int, lost: Any) -> Any:
        """Return the handle of a worker that is not this one, which died; create the worker if there is none."""
        with self._lock:
            if number not in self._found or self._found[number] is lost:
                self._found.pop(number, None)
                self._found[number] = asyncio.run(get_worker(self._run, "reward", number))
            return self._found[number]


class WorkerRewardBatch(RewardBatch):
    """A batch of groups that reward workers score."""

    def __init__(self, scorer: WorkerRewardScorer) -> None:
        self._scorer = scorer
        self._calls: dict[int, Future[RewardOutcome]] = {}

    def add(self, number: int, item: RewardItem) -> None:
        assert number not in self._calls, f"group {number} was added before"
        self._calls[number] = self._scorer.submit(item)

    def finish(self) -> dict[int, RewardOutcome]:
        """Wait for all groups; an error that a worker raises, or a worker that dies too often, ends that."""
        return {number: future.result() for number, future in self._calls.items()}

    def close(self) -> None:
        """Drop the groups that no worker scores yet."""
        for future in self._calls.values():
            future.cancel()
