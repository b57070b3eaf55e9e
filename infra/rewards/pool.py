"""Processes that score responses: a reward that hangs or crashes costs one row, not the run.

Pebble's ProcessPool, which also ends workers after a time limit, can leave a task waiting for ever when a limit expires
while its worker takes the next task (github.com/noxdafox/pebble/issues/153), and runs no two async calls at once.
"""

import logging
import math
import selectors
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from infra.rewards.process import RewardProcess
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.reward import IsolatedReward
from schemas.errors import RewardImportError

logger = logging.getLogger(__name__)

READY_SECONDS = 300.0  # for importing the reward's module
POLL_SECONDS = 1.0  # between looks at whether a silent process is still there
GRACE_SECONDS = 1.0  # for concurrent calls, which are first ended from within
CHUNKS_PER_PROCESS = 4  # to even out rewards that take longer than others
MAX_CHUNK_ITEMS = 16

Chunk = list[int]


class RewardPool:
    """The reward processes of one rollout worker.

    Args:
        config: The reward, its time limit and its number of processes.
    """

    def __init__(self, config: IsolatedReward) -> None:
        self._config = config
        self._processes: list[RewardProcess] = []
        self._selector = selectors.DefaultSelector()
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
        while any(process.concurrent is None for process in self._processes):
            self._wait()

    def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """Return the items' outcomes, in order.

        One that has no answer within `timeout_seconds`, or whose process ends, is a failure; the process is replaced,
        and goes on with the other items. Of several concurrent calls in a process that stops answering, each is made
        again on its own.

        Raises:
            RewardImportError: A process that replaces another can't load the reward function.
        """
        self.wait_until_ready()
        work = _Work(items, self._chunks(len(items)))
        while work.num_open:
            for process in self._processes:
                if work.chunks and process.is_idle() and not process.has_died():
                    numbers = work.chunks.popleft()
                    process.send(numbers, [items[number] for number in numbers])
            self._wait(work)
        return work.outcomes

    def close(self) -> None:
        """End all processes."""
        self._selector.close()
        _close_all(self._processes)

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [process.pid for process in self._processes]

    def _chunks(self, num_items: int) -> Iterable[Chunk]:
        size = math.ceil(num_items / len(self._processes))
        if not any(process.concurrent for process in self._processes):
            size = min(max(size // CHUNKS_PER_PROCESS, 1), MAX_CHUNK_ITEMS)
        return (list(range(first, min(first + size, num_items))) for first in range(0, num_items, size or 1))

    def _add_process(self) -> None:
        process = RewardProcess(self._config)
        self._processes.append(process)
        self._selector.register(process, selectors.EVENT_READ, process)

    def _wait(self, work: "_Work | None" = None) -> None:
        """Wait until something happens or a process is overdue; take its answers, and replace those that are lost."""
        ready = {key.data for key, _ in self._selector.select(self._seconds_to_wait())}
        for process in list(self._processes):
            if process in ready:
                self._take(process, process.receive(), work)
            reason = self._loss(process, ready)
            if reason is not None:
                self._replace(process, reason, work)

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        limits = [process.heard_at + self._limit(process) - now for process in self._processes]
        return max(0.0, min([POLL_SECONDS, *limits]))

    def _limit(self, process: RewardProcess) -> float:
        """How many seconds a process may be silent."""
        if process.concurrent is None:
            return READY_SECONDS
        if not process.outstanding or self._config.timeout_seconds is None:
            return math.inf
        return self._config.timeout_seconds + (GRACE_SECONDS if process.concurrent else 0.0)

    def _loss(self, process: RewardProcess, ready: set[RewardProcess]) -> str | None:
        """Why a process is lost, or None: what it answered is looked at first, however late this process is."""
        if process.ended or (process not in ready and process.has_died()):
            return "ended"
        if process not in ready and time.monotonic() > process.heard_at + self._limit(process):
            return "late"
        return None

    def _take(self, process: RewardProcess, answers: Iterable[dict[str, Any]], work: "_Work | None") -> None:
        for answer in answers:
            if "error" in answer:
                raise RewardImportError(answer["error"])
            if "concurrent" in answer:
                process.concurrent = answer["concurrent"]
                continue
            assert work is not None, "an answer to nothing that was asked"
            work.settle(answer["item"], RewardOutcome(answer["reward"], answer["parts"], answer["failure"]))

    def _replace(self, process: RewardProcess, reason: str, work: "_Work | None") -> None:
        how = process.kill()
        answers = process.receive()  # what it said before it was ended
        self._take(process, answers, work)
        self._selector.unregister(process)
        self._processes.remove(process)
        process.close()
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


class _Work:
    """The items of one call: what is done, and what is still to be handed out."""

    def __init__(self, items: Sequence[RewardItem], chunks: Iterable[Chunk]) -> None:
        self._outcomes: list[RewardOutcome | None] = [None] * len(items)
        self.num_open = len(items)
        self.chunks = deque(chunks)

    @property
    def outcomes(self) -> list[RewardOutcome]:
        assert not self.num_open
        return [outcome for outcome in self._outcomes if outcome is not None]

    def settle(self, number: int, outcome: RewardOutcome) -> None:
        self._outcomes[number] = outcome
        self.num_open -= 1

    def lose(self, process: RewardProcess, outcome: RewardOutcome, *, blame: bool) -> None:
        """Give the item that a lost process was at its outcome, and hand out the others again.

        Where calls were concurrent it could have been any of them: each is tried on its own. With `blame` off, the
        process had gone on to the next item just before it was ended; then none is at fault.
        """
        numbers = process.outstanding
        if process.concurrent and len(numbers) > 1:
            self.chunks.extendleft([number] for number in reversed(numbers))
            return
        if blame:
            self.settle(numbers[0], outcome)
            numbers = numbers[1:]
        if numbers:
            self.chunks.appendleft(numbers)


def _close_all(processes: list[RewardProcess]) -> None:
    for process in processes:
        process.close()
    processes.clear()
