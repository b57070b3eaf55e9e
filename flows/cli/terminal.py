"""The terminal: tables that fit it; closed pipes, hang-ups and full disks under its output don't end a run."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

logger = logging.getLogger(__name__)

PIPE_WIDTH = 132  # a pipe has no width, and rich would assume 80


def with_width(console: Console) -> Console:
    """Return the console, or one that is wide enough for a table if it is a pipe."""
    return console if console.is_terminal else Console(file=console.file, width=max(console.width, PIPE_WIDTH))


def plain_table(*names: str, left: int, title: str | None = None) -> Table:
    """Return an empty table whose first `left` columns hold text and the others numbers."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    return table


@contextmanager
def outlived_terminal() -> Iterator[None]:
    """Go on if nothing can be written to standard output or error any more, or if the terminal hangs up.

    What is printed from then on is lost; the log in the run's directory has it.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(sys.stdout, "standard output"), _Output(sys.stderr, "standard error")
    hung_up = signal.signal(signal.SIGHUP, _note_hangup)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, hung_up)
        sys.stdout, sys.stderr = streams


class _Output:
    """A stream of which a failure to write is a line in the log, once; then it is `/dev/null`.

    The descriptor is replaced, not only this object: other writers, and Python at its exit, would fail as well.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._is_lost = stream, name, False

    def write(self, text: str) -> int:
        """Write, if it can be; return the number of characters, as if it could."""
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, if it can be."""
        self._call(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, method: Callable[..., object], *args: str) -> None:
        if self._is_lost:
            return
        try:
            method(*args)
        except (OSError, ValueError) as error:  # the latter if it was closed
            self._is_lost = True
            _discard(self._stream)
            logger.warning("%s can't be written (%s): the run goes on, and its log has all lines", self._name, error)


def _discard(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # it has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def _note_hangup(number: int, frame: FrameType | None) -> None:
    logger.warning("the terminal has hung up: the run goes on; `sluice stop` ends it")
