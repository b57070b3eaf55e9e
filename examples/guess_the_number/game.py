"""The game: guess a number, and be told whether it is higher or lower."""

import random
from typing import Any


class GuessTheNumber:
    """One game. The same seed has the same number."""

    def __init__(self, task: Any, seed: int, top: int = 7) -> None:
        self._number = random.Random(seed).randint(1, top)

    def reset(self) -> None:
        """Begin; the prompt is the data row's."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return what is said to a guess, its reward, and whether the game is over."""
        if not action.isdecimal():
            return "say a number", 0.0, False
        guess = int(action)
        if guess == self._number:
            return "right", 1.0, True
        return "higher" if guess < self._number else "lower", 0.0, False
