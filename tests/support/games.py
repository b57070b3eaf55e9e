"""Environments and tools for tests."""

import os
import time
from typing import Any


class Echo:
    """Says how long the turn was; ends after so many turns, which differ from task to task, with their number."""

    def __init__(self, task: Any, seed: int, longest: int = 3) -> None:
        self._turns, self._last, self._seed = 0, 1 + task["info"]["index"] % longest, seed

    def reset(self) -> None:
        pass

    def step(self, action: str) -> tuple[str, float, bool]:
        self._turns += 1
        return f"{self._seed % 100}: {len(action)}", 0.5, self._turns == self._last


class Asking:
    """Asks for a second turn; the reward of each is its number of different characters."""

    def __init__(self, task: Any, seed: int) -> None:
        self._turns = 0

    def reset(self) -> None:
        pass

    def step(self, action: str) -> tuple[str, float, bool]:
        self._turns += 1
        return "go on", float(len(set(action))), self._turns == 2


class Endless(Echo):
    """Never ends."""

    def step(self, action: str) -> tuple[str, float, bool]:
        return *super().step(action)[:2], False


class Greeting(Echo):
    """Has the first word, too."""

    def reset(self) -> str:  # type: ignore[override]
        return f"I am {self._seed % 1000}"


class Noted(Greeting):
    """Writes a line for each call to a file."""

    def __init__(self, task: Any, seed: int, log: str) -> None:
        super().__init__(task, seed)
        self._log = log

    def reset(self) -> str:
        self._note("reset")
        return super().reset()

    def step(self, action: str) -> tuple[str, float, bool]:
        self._note("step")
        return super().step(action)

    def _note(self, call: str) -> None:
        with open(self._log, "a") as file:
            file.write(f"{call} {self._seed}\n")


SALT = os.urandom(4).hex()


class Salted(Noted):
    """Answers otherwise in each process."""

    def reset(self) -> str:
        return f"{super().reset()} {SALT}"

    def step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, done = super().step(action)
        return f"{observation} {SALT}", reward, done


class Search(Salted):
    """Keeps nothing, and so never ends a trajectory."""

    keeps_state = False

    def step(self, action: str) -> tuple[str, float, bool]:
        return *super().step(action)[:2], False


class Slow(Echo):
    """Takes its time, a different one each time."""

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(0.05 * (time.monotonic_ns() % 3))
        return super().step(action)


class Fragile(Echo):
    """Fails at its second turn, if its index is odd."""

    def __init__(self, task: Any, seed: int) -> None:
        super().__init__(task, seed)
        self._is_odd = task["info"]["index"] % 2 == 1

    def reset(self) -> None:
        if self._is_odd and self._last == 2:
            raise ValueError("no such game")

    def step(self, action: str) -> tuple[str, float, bool]:
        if self._is_odd:
            raise ValueError("out of cards")
        return super().step(action)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def wait() -> str:
    """Wait forever."""
    while True:
        time.sleep(1)
