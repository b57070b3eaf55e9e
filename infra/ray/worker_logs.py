"""The log lines of workers: they reach the driver with the result, or the error, of the call that wrote them.

So they belong to whatever waits for that call. What no call carries, as when a worker dies, is in Ray's own log files.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OWN_PACKAGES = ("schemas", "rl_core", "infra")  # those that log in a worker; of others, only warnings are kept
MAX_LINES = 200  # that wait for a call to carry them

_ATTRIBUTE = "worker_log_lines"  # of an error that a call raised


@dataclass(frozen=True)
class LogLine:
    """One line of a worker's log."""

    worker: str
    logger: str
    level: int
    message: str  # with its traceback, if it has one
    created: float  # Unix time


@dataclass(frozen=True)
class Reply:
    """The result of a call, with the lines that were logged until then."""

    result: Any
    lines: Sequence[LogLine]


class LogBuffer(logging.Handler):
    """A handler that keeps a worker's lines until a call carries them to the driver."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker, self._lines, self._num_dropped = worker, list[LogLine](), 0

    def install(self) -> None:
        """Begin to collect what this process logs."""
        logging.getLogger().addHandler(self)
        for package in OWN_PACKAGES:
            logging.getLogger(package).setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; called under the handler's lock."""
        if record.levelno < logging.WARNING and record.name.partition(".")[0] not in OWN_PACKAGES:
            return
        if len(self._lines) == MAX_LINES:
            self._num_dropped += 1
        else:
            line = LogLine(self._worker, record.name, record.levelno, self.format(record), record.created)
            self._lines.append(line)

    def take(self) -> list[LogLine]:
        """Return the lines so far, and forget them; if there were too many, the last one says how many are missing."""
        with self.lock:  # type: ignore[union-attr]  # set by the base class
            lines, self._lines = self._lines, []
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            message = f"{num_dropped} more lines are not shown"
            lines.append(LogLine(self._worker, __name__, logging.WARNING, message, lines[-1].created))
        return lines

    def attach(self, error: BaseException) -> None:
        """Have an error that a call raises carry the lines."""
        setattr(error, _ATTRIBUTE, self.take())


def open_reply(answer: Any) -> Any:
    """Return the result of a call, and log the lines that came with it in this process."""
    if not isinstance(answer, Reply):
        return answer
    _log(answer.lines)
    return answer.result


def log_lines_of(error: BaseException) -> None:
    """Log the lines that came with an error in this process, once."""
    _log(vars(error).pop(_ATTRIBUTE, ()))


def _log(lines: Sequence[LogLine]) -> None:
    for line in lines:
        fields = {
            "name": line.logger,
            "levelno": line.level,
            "levelname": logging.getLevelName(line.level),
            "msg": f"{line.worker}: {line.message}",
            "created": line.created,
            "worker": line.worker,
        }
        logging.getLogger(line.logger).handle(logging.makeLogRecord(fields))
