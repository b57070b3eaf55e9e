"""`driver.log`: what a run's driver logs, and the traceback of the error that ended it."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.storage.runs import RunDirectory

NAME = "driver.log"

logger = logging.getLogger(__name__)


@contextmanager
def driver_log(directory: RunDirectory) -> Iterator[None]:
    """Append this process's log to the run's `driver.log` during the block, and name the file in an error's notes."""
    handler = _LogFile(directory.path / NAME)
    logging.getLogger().addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.write_error(error)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def log_error(directory: RunDirectory, error: Exception) -> None:
    """Append an error's traceback to the run's `driver.log`, unless it is there, and name the file in its notes."""
    if not any(note.startswith("log: ") for note in getattr(error, "__notes__", ())):
        handler = _LogFile(directory.path / NAME)
        handler.write_error(error)
        handler.close()


class _LogFile(logging.FileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._has_failed = False

    def write_error(self, error: Exception) -> None:
        trace = type(error), error, error.__traceback__
        self.handle(logger.makeRecord(__name__, logging.ERROR, __file__, 0, "the driver stopped", (), trace))
        if not self._has_failed:
            path = Path(self.baseFilename)
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            error.add_note(f"log: {shown}")

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was reported, and is still buffered
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that the file can't be written; logging itself would print a traceback for every line."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("can't write %s: %s", self.baseFilename, sys.exc_info()[1])
