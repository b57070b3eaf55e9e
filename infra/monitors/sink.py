"""The protocol of sinks: one monitor's library or file."""

from typing import Protocol

from infra.monitors.rows import Position, Row


class Sink(Protocol):
    """Writes one run's rows to a tracker or a file. It is used by one thread only, and may block or raise anything.

    Opening it again, in a resumed run or after an error, continues the run in the tracker.
    """

    def position(self) -> Position:
        """Return the last rows that it holds: those before are not logged again, all others are."""
        ...

    def log(self, row: Row) -> None:
        """Write a row."""
        ...

    def close(self, succeeded: bool) -> None:
        """Deliver all rows, release what the sink holds, and say how the run ended."""
        ...
