"""`driver.log`: what a run's driver logs, and the traceback of the error that ended it.

One process may drive several runs at the same time, each in an asyncio task of its own.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from infra.storage.lines import Lines
from infra.storage.runs import RunDirectory
from schemas.errors import RunTakenOverError

NAME = "driver.log"
FLUSH_SECONDS = 5.0  # between two writes to a remote file system: what a killed driver may lose

logger = logging.getLogger(__name__)
_own: ContextVar[str | None] = ContextVar("own", default=None)  # the run that is driven where something is logged
_driven: list[str] = []  # by this process


@contextmanager
def driver_log(directory: RunDirectory) -> Iterator[None]:
    """Append this process's log to the run's log during the block, and name the log in an error's notes.

    What is logged for another run is left out.
    """
    handler, run_id = _open(directory), directory.run_id
    handler.addFilter(lambda _: _own.get() in (None, run_id))
    logging.getLogger().addHandler(handler)
    token = _own.set(run_id)
    _driven.append(run_id)
    try:
        yield
    except Exception as error:
        _write_error(handler, error)
        raise
    finally:
        _driven.remove(run_id)
        _own.reset(token)
        logging.getLogger().removeHandler(handler)
        handler.close()


def one_of_several() -> str | None:
    """Return the id of the run for which something is logged, if this process drives several; else None."""
    return _own.get() if len(_driven) > 1 else None


def log_error(directory: RunDirectory, error: Exception) -> None:
    """Append an error's traceback to the run's log, unless it is there, and name the log in its notes."""
    if not any(note.startswith("log: ") for note in getattr(error, "__notes__", ())):
        handler = _open(directory)
        _write_error(handler, error)
        handler.close()


class _LogFile(logging.FileHandler):
    """The log of a run in a local folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self.has_failed = False

    @property
    def shown(self) -> str:
        path = Path(self.baseFilename)
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was reported, and is still buffered
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that the file can't be written; logging itself would print a traceback for every line."""
        if not self.has_failed:
            self.has_failed = True
            _warn(self.baseFilename, sys.exc_info()[1])


class _RemoteLog(logging.Handler):
    """The log of a run on another file system, written every `FLUSH_SECONDS` and at the end."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines, self._waiting, self.has_failed = lines, list[str](), False
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._flush_forever, name=NAME, daemon=True)
        self._thread.start()

    @property
    def shown(self) -> str:
        return str(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        self._waiting.append(self.format(record) + "\n")

    def flush(self) -> None:
        with self._writing:
            if not (waiting := list(self._waiting)):
                return
            try:
                self._lines.append("".join(waiting))
                del self._waiting[: len(waiting)]
            except (OSError, RunTakenOverError) as error:  # the next flush tries again
                if not self.has_failed:
                    self.has_failed = True
                    _warn(self.shown, error)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.flush()
        super().close()

    def _flush_forever(self) -> None:
        while not self._ended.wait(FLUSH_SECONDS):
            self.flush()


def _open(directory: RunDirectory) -> _LogFile | _RemoteLog:
    handler = _LogFile(directory.path / NAME) if directory.is_local else _RemoteLog(directory.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _write_error(handler: _LogFile | _RemoteLog, error: Exception) -> None:
    trace = type(error), error, error.__traceback__
    handler.handle(logger.makeRecord(__name__, logging.ERROR, __file__, 0, "the driver stopped", (), trace))
    if isinstance(handler, _RemoteLog):
        handler.flush()
    if not handler.has_failed:
        error.add_note(f"log: {handler.shown}")


def _warn(place: str, error: BaseException | None) -> None:
    logger.warning("can't write %s: %s", place, error)
