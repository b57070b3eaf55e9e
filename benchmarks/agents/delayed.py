"""The environment of the benchmark; its processes import this module, and so it imports nothing heavy."""

import asyncio
from typing import Any

ANSWER = "Go on, please."


class Delayed:
    """An environment that takes its time."""

    def __init__(self, task: Any, seed: int, milliseconds: float, turns: int) -> None:
        self._seconds, self._left = milliseconds / 1000, turns

    def reset(self) -> None:
        """Begin."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Answer after a wait."""
        await asyncio.sleep(self._seconds)
        self._left -= 1
        return ANSWER, 0.0, self._left == 0
