"""A watchdog that starts the local Prefect server again if it dies under a running command."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from infra.services.local import LocalServices
from schemas.errors import ServiceError

POLL_SECONDS = 1.0
MAX_FAILURES = 3  # starts that fail in a row, after which the watchdog gives up

logger = logging.getLogger(__name__)


@contextmanager
def prefect_kept_running(services: LocalServices) -> Iterator[None]:
    """Start the folder's Prefect server again whenever it dies during the block, at its port and on its database."""
    ended = threading.Event()
    watchdog = threading.Thread(target=_watch, args=(services, ended), name="prefect-watchdog", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        ended.set()
        watchdog.join()  # a server that it is starting would otherwise be left behind unrecorded


def _watch(services: LocalServices, ended: threading.Event) -> None:
    failures = 0
    while failures < MAX_FAILURES and not ended.wait(POLL_SECONDS):
        try:
            if services.restart_prefect():
                logger.warning("the local Prefect server had died, and was started again")
            failures = 0
        except (ServiceError, OSError) as error:
            failures += 1
            logger.warning("the local Prefect server can't be started again: %s", error)
