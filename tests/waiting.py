"""Waiting in tests: for conditions, never for a time."""

import time
from collections.abc import Callable

DEADLINE_SECONDS = 240  # below pytest's own timeout; only a hang reaches it, not a slow machine


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return once `condition` holds; `what` says in the failure what was awaited."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_SECONDS} s"
        time.sleep(0.05)
