"""Busy processes next to a measurement."""

import psutil

from benchmarks.busy import BUSY, busy_processes


def test_as_many_are_busy_as_were_asked_for_and_none_afterwards() -> None:
    def busy() -> int:
        return sum(BUSY in child.cmdline() for child in psutil.Process().children())

    with busy_processes(2):
        assert busy() == 2
    assert busy() == 0
