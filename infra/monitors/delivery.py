"""Sinks (one monitor's library or file), and the delivery of rows to one by a thread of its own.

So a run neither waits for a sink nor fails with it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from infra.monitors.rows import Position, Row

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


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


class Delivery:
    """Delivers rows in order to a sink, which it opens.

    The rows that the sink refuses are kept, and delivered with the next one that it accepts, by a sink that is opened
    again. That one also gets the rows that the broken one took and lost. Only the first error is logged.

    Args:
        name: The monitor's name, for messages.
        open_sink: Opens the sink.
        recorded: Returns all rows so far, in order.
        log: Where an error is reported.
    """

    def __init__(
        self, name: str, open_sink: Callable[[], Sink], recorded: Callable[[], Iterable[Row]], log: Log
    ) -> None:
        self._name, self._open_sink, self._recorded, self._log = name, open_sink, recorded, log
        self._sink: Sink | None = None
        self._position = Position()
        self._waiting: deque[Row] = deque()
        self._has_news = threading.Event()  # a row, or the end of the run
        self._has_ended = self._succeeded = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=f"monitor {name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Deliver a row, soon, unless the sink holds it: a resumed run offers all rows, and a step may be run again."""
        self._waiting.append(row)
        self._has_news.set()

    def end(self, succeeded: bool) -> None:
        """Have the sink closed once it has all rows; `join` waits for it."""
        self._succeeded, self._has_ended = succeeded, True
        self._has_news.set()

    def join(self, deadline: float) -> None:
        """Wait until the sink is closed, or until `deadline` (of `time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() or self._waiting:
            self._log.warning(
                "monitor %s did not finish in time: it lacks %d reports, which metrics.jsonl has",
                self._name,
                len(self._waiting),
            )

    def _run(self) -> None:
        while True:
            has_ended = self._has_ended  # read first: all rows are there by then
            self._attempt(self._deliver)
            if has_ended:
                self._attempt(self._close)
                return
            self._has_news.wait()
            self._has_news.clear()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  a tracker's library may raise anything, and no run fails for it
            broken, self._sink = self._sink, None
            if broken is not None:
                with suppress(Exception):
                    broken.close(False)
            if not self._has_failed:
                reason = " ".join(f"{type(error).__name__}: {error}".split())  # a library's message may have many lines
                self._log.warning("monitor %s failed, and is tried again after each step: %s", self._name, reason)
            self._has_failed = True

    def _deliver(self) -> None:
        if self._sink is None:
            self._sink = self._open_sink()
            self._position = self._sink.position()
            for row in self._recorded() if self._has_failed else ():
                self._write(self._sink, row)
        while self._waiting:
            self._write(self._sink, self._waiting[0])
            self._waiting.popleft()

    def _write(self, sink: Sink, row: Row) -> None:
        if not self._position.includes(row):
            sink.log(row)
            self._position = self._position.after(row)

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close(self._succeeded)
