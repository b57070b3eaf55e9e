"""A clock that stands still until a test moves it, in all processes at once."""

import os
from pathlib import Path


class ManualClock:
    """A clock whose time is kept in a file: a copy of it in another process shows the same time.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._set(0.0)

    def __call__(self) -> float:
        """Return the time in seconds."""
        with open(self._path) as file:
            return float(file.read())

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        self._set(self() + seconds)

    def _set(self, now: float) -> None:
        temporary = f"{self._path}.tmp"
        with open(temporary, "w") as file:
            file.write(repr(now))
        os.replace(temporary, self._path)  # a reader sees the old time or the new one
