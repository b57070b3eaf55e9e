"""Fixtures that several test modules of this folder share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that reach the handler of before the flow, to which Prefect sends a SIGTERM on."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)
