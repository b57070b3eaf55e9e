"""The items of one batch: what is still to come, to be handed out, at work, and done."""

import math
import socket
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue

from infra.rewards.process import RewardProcess
from rl_core.rewards import RewardItem, RewardOutcome

CHUNKS_PER_PROCESS = 4  # to even out rewards that take longer than others
MAX_CHUNK_ITEMS = 16


class RewardQueue:
    """One batch, between the thread that adds its items and the one that serves the processes.

    `add`, `end` and `abandon` are called by the former, all else by the latter; `outcomes` is for the former once the
    latter has ended.
    """

    def __init__(self) -> None:
        self.outcomes: dict[int, RewardOutcome] = {}
        self._numbers: set[int] = set()
        self._arrivals: SimpleQueue[tuple[int, RewardItem] | None] = SimpleQueue()  # None: there will be no more
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._items: dict[int, RewardItem] = {}  # those without an outcome
        self._waiting: deque[int] = deque()  # to be handed out, suspects first
        self._suspects: set[int] = set()  # calls that were open when a process that overlaps them was lost
        self._ended = False
        self._abandoned = False

    def add(self, number: int, item: RewardItem) -> None:
        """Hand over an item."""
        assert number not in self._numbers, f"item {number} was added before"
        self._numbers.add(number)
        self._arrivals.put((number, item))
        self._ring()

    def end(self) -> None:
        """Say that there will be no further item."""
        self._arrivals.put(None)
        self._ring()

    def abandon(self) -> None:
        """Say that no outcome is wanted any more."""
        self._abandoned = True
        self._ring()

    def close(self) -> None:
        """Let go of its sockets; the thread that serves the processes has ended."""
        self._bell.close()
        self._ear.close()

    def fileno(self) -> int:
        """The descriptor to wait on for items."""
        return self._ear.fileno()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to do."""
        return self._abandoned or (self._ended and not self._items)

    def take_arrivals(self) -> None:
        """Take in what was handed over, without waiting."""
        with suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        with suppress(Empty):
            while (arrival := self._arrivals.get_nowait()) is not None:
                number, item = arrival
                self._items[number] = item
                self._waiting.append(number)
            self._ended = True

    def may_take(self, process: RewardProcess) -> bool:
        """Whether the process can be given something now.

        Calls that overlap go to any process, those at work included; but a suspect has a process to itself.
        """
        if not self._waiting or process.concurrent is None:
            return False
        if not process.concurrent or self._waiting[0] in self._suspects:
            return not process.outstanding
        return self._suspects.isdisjoint(process.outstanding)

    def hand_out(self, process: RewardProcess, num_takers: int) -> None:
        """Give the process its share, as the first of `num_takers` processes that may take something."""
        if not self._waiting:
            return
        size = math.ceil(len(self._waiting) / num_takers)
        if not process.concurrent:
            size = min(max(size // CHUNKS_PER_PROCESS, 1), MAX_CHUNK_ITEMS)
        elif self._waiting[0] in self._suspects:
            size = 1
        numbers = [self._waiting.popleft() for _ in range(size)]
        process.send(numbers, [self._items[number] for number in numbers])

    def settle(self, number: int, outcome: RewardOutcome) -> None:
        """Record an item's outcome."""
        del self._items[number]
        self.outcomes[number] = outcome

    def lose(self, process: RewardProcess, outcome: RewardOutcome, *, blame: bool) -> None:
        """Give the item that a lost process was at its outcome, and hand out the others again.

        Where calls overlapped it could have been any of them: each is tried on its own. With `blame` off, the process
        had gone on to the next item just before it was ended; then none is at fault.
        """
        numbers = process.outstanding
        if process.concurrent and len(numbers) > 1:
            self._suspects.update(numbers)
        elif blame:
            self.settle(numbers[0], outcome)
            numbers = numbers[1:]
        self._waiting.extendleft(reversed(numbers))

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it is full of rings that will be heard
            self._bell.send(b"\0")
