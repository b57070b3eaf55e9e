"""Busy processes next to a measurement."""

from benchmarks.busy import BUSY, busy_processes
from tests.support.progress import children_running


def test_as_many_are_busy_as_were_asked_for_and_none_afterwards() -> None:
    def busy() -> int:
        return len(children_running(BUSY))

    with busy_processes(2):
        assert busy() == 2
    assert busy() == 0
