"""The items of one batch: added, waiting, dispatched to processes, and done."""

import math
import socket
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue

from infra.rewards.process import RewardProcess
from rl_core.rewards import RewardItem, RewardOutcome

CHUNKS_PER_PROCESS = 4  # to balance rewards that take different times
MAX_CHUNK_ITEMS = 16


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
