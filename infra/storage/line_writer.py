"""Lines that are appended in the background, so that who writes them goes on meanwhile."""

import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import Generic, TypeVar

from infra.storage.lines import Lines

MAX_WAITING = 1024  # lines; beyond, `write` waits

Entry = TypeVar("Entry")


class LineWriter(Generic[Entry]):
    """Appends entries to a file in a thread of its own; those that wait are written, and synced, together.

    After an error nothing more is written, and whoever writes or closes gets it.

    Args:
        lines: The file.
        dump: Returns an entry's line, with its line break; called in the thread.
    """

    def __init__(self, lines: Lines, dump: Callable[[Entry], str]) -> None:
        self._lines, self._dump = lines, dump
        self._waiting: Queue[Entry | None] = Queue(MAX_WAITING)  # None: the end
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def write(self, entry: Entry) -> None:
        """Have an entry appended soon.

        Raises:
            OSError: An earlier one can't be written.
        """
        self._check()
        self._waiting.put(entry)

    def close(self) -> None:
        """Wait until all entries are durable.

        Raises:
            OSError: One can't be written.
        """
        self._waiting.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if isinstance(self._error, OSError):
            raise OSError(self._error.errno, f"{self._lines} can't be written: {self._error}") from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        is_open = True
        while is_open:
            entries = [self._waiting.get()]
            try:
                while True:
                    entries.append(self._waiting.get_nowait())
            except Empty:
                pass
            is_open = None not in entries
            if self._error is None:  # else the queue is only emptied, so that nobody waits for it
                try:
                    if text := "".join(self._dump(entry) for entry in entries if entry is not None):
                        self._lines.append(text)
                except Exception as error:  # noqa: BLE001 - it is raised where the entries come from
                    self._error = error
