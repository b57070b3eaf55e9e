"""A pool of processes that compute rewards: a reward that hangs or crashes costs one row, not the run.

Pebble's ProcessPool, which also kills workers after a time limit, can leave a task waiting forever if a limit expires
while its worker takes the next task (github.com/noxdafox/pebble/issues/153), and can't run two async calls at once.
"""

import json
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

from infra.processes.isolated import IsolatedProcess
from infra.rewards.base import RewardBatch, RewardScorer
from infra.rewards.child import MESSAGE_BYTES
from rl_core.rewards import RewardItem, RewardOutcome
from schemas import errors
from schemas.config.reward_base import IsolatedReward
from schemas.errors import RewardImportError

# Not multiprocessing's spawn: it would import the parent's __main__, which is Ray's worker, and with it Ray.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from infra.rewards.child import main; main(int(sys.argv[1]))"
)
SEND_SECONDS = 60.0  # a process that receives nothing for this long is killed
CHUNKS_PER_PROCESS = 4  # to balance rewards that take different times
MAX_CHUNK_ITEMS = 16
logger = logging.getLogger(__name__)
READY_SECONDS = 300.0  # for importing the reward's module
POLL_SECONDS = 1.0  # between checks that a silent process is still alive
GRACE_SECONDS = 1.0  # added to the limit of concurrent calls, and given to a process that closed its socket to end
Loss = Literal["ended", "late"]


class RewardProcess(IsolatedProcess):
    """One process that loads a reward function and scores the items that it is sent.

    Args:
        config: The reward.
    """

    def __init__(self, config: IsolatedReward) -> None:
        path = json.dumps([folder or os.getcwd() for folder in sys.path])
        super().__init__([sys.executable, "-P", "-c", PROGRAM], [path])
        self.concurrent: bool | None = None  # whether calls may overlap; None: not ready yet
        self.outstanding: list[int] = []  # items sent but not answered, in order
        self.last_active = time.monotonic()  # when it last answered, or was sent something while idle
        self._send(config)

    def send(self, numbers: Sequence[int], items: Sequence[RewardItem]) -> None:
        """Send `items` to be scored and answered under their `numbers`."""
        if not self.outstanding:  # else the time already spent on the current item counts
            self.last_active = time.monotonic()
        self.outstanding.extend(numbers)
        self._send(list(zip(numbers, items, strict=True)))

    def receive(self) -> list[dict[str, Any]]:
        """Return the answers received so far, without waiting; sets `ended` if no more will follow."""
        answers = super().receive()
        if answers:
            self.last_active = time.monotonic()
        for answer in answers:
            if "item" in answer:
                self.outstanding.remove(answer["item"])
        return answers

    def _send(self, message: object) -> None:
        data = pickle.dumps(message)
        self._connection.settimeout(SEND_SECONDS)
        try:
            self._connection.sendall(MESSAGE_BYTES.pack(len(data)) + data)
        except ConnectionError:
            pass  # it has ended, which the next check detects
        except TimeoutError:  # after half a message it is unusable
            os.killpg(self.pid, signal.SIGKILL)
        self._connection.setblocking(False)


class RewardQueue:
    """The items of one batch, between the thread that adds them and the thread that serves the processes.

    The former calls `add`, `finish` and `abandon`, the latter everything else; the former reads `outcomes` once the
    latter has ended.
    """

    def __init__(self) -> None:
        self.outcomes: dict[int, RewardOutcome] = {}
        self._numbers: set[int] = set()
        self._arrivals: SimpleQueue[tuple[int, RewardItem] | None] = SimpleQueue()  # None: no more items follow
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._items: dict[int, RewardItem] = {}  # without an outcome
        self._waiting: deque[int] = deque()  # not dispatched, suspects first
        self._suspects: set[int] = set()  # calls that were open when a process that overlaps calls was lost
        self._finished = False
        self._abandoned = False

    def add(self, number: int, item: RewardItem) -> None:
        """Add an item."""
        assert number not in self._numbers, f"item {number} was added before"
        self._numbers.add(number)
        self._arrivals.put((number, item))
        self._wake()

    def finish(self) -> None:
        """Declare that no further items follow."""
        self._arrivals.put(None)
        self._wake()

    def abandon(self) -> None:
        """Declare that no outcomes are wanted any more."""
        self._abandoned = True
        self._wake()

    def close(self) -> None:
        """Close the sockets, once the thread that serves the processes has ended."""
        self._wake_sender.close()
        self._wake_receiver.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when items are added."""
        return self._wake_receiver.fileno()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self._abandoned or (self._finished and not self._items)

    def receive_arrivals(self) -> None:
        """Move added items to the waiting ones, without blocking."""
        with suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        with suppress(Empty):
            while (arrival := self._arrivals.get_nowait()) is not None:
                number, item = arrival
                self._items[number] = item
                self._waiting.append(number)
            self._finished = True

    def can_dispatch_to(self, process: RewardProcess) -> bool:
        """Return whether the process can be sent something now.

        Calls that may overlap go to any process, including busy ones; but a suspect gets a process of its own.
        """
        if not self._waiting or process.concurrent is None:
            return False
        if not process.concurrent or self._waiting[0] in self._suspects:
            return not process.outstanding
        return self._suspects.isdisjoint(process.outstanding)

    def dispatch(self, process: RewardProcess, num_receivers: int) -> None:
        """Send the process its part of the waiting items; it is the first of `num_receivers` to be sent some now."""
        if not self._waiting:
            return
        size = math.ceil(len(self._waiting) / num_receivers)
        if not process.concurrent:
            size = min(max(size // CHUNKS_PER_PROCESS, 1), MAX_CHUNK_ITEMS)
        elif self._waiting[0] in self._suspects:
            size = 1
        numbers = [self._waiting.popleft() for _ in range(size)]
        process.send(numbers, [self._items[number] for number in numbers])

    def record(self, number: int, outcome: RewardOutcome) -> None:
        """Record an item's outcome."""
        del self._items[number]
        self.outcomes[number] = outcome

    def requeue(self, process: RewardProcess, outcome: RewardOutcome, *, was_scoring: bool) -> None:
        """Record `outcome` for the item that a lost process was scoring, and queue its other items again.

        If calls overlapped, it could have been any of them, so each is retried on its own. With `was_scoring` false,
        the process had moved on to its next item just before it was killed; then no item gets the outcome.
        """
        numbers = process.outstanding
        if process.concurrent and len(numbers) > 1:
            self._suspects.update(numbers)
        elif was_scoring:
            self.record(numbers[0], outcome)
            numbers = numbers[1:]
        self._waiting.extendleft(reversed(numbers))

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the buffer is full of earlier wake-ups, which suffice
            self._wake_sender.send(b"\0")


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
