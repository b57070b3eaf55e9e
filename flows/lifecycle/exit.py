"""The end of a process that ran a flow, which must not wait for a Prefect server or a Ray that is gone."""

import concurrent.futures
import gc
import os
import sys
import time
from typing import NoReturn

from schemas.errors import RayLostError

POLL_SECONDS = 2.0
MAX_SECONDS = 60.0  # for a server that is slow

_undelivered = False  # whether Prefect's queues still hold what the server doesn't take


def deliver_events(api_url: str) -> None:
    """Wait until Prefect's queues of events and logs are empty; give up soon if the server is gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    from infra.services.prefect_api import prefect_is_gone

    global _undelivered
    deadline = time.monotonic() + MAX_SECONDS
    left: set[concurrent.futures.Future[bool]] = set()
    for worker in (EventsWorker, APILogWorker):
        drained = worker.drain_all(timeout=0, at_exit=False)
        assert isinstance(drained, tuple)  # as no event loop is running
        left |= drained[1]
    while left and time.monotonic() < deadline:
        _, left = concurrent.futures.wait(left, timeout=POLL_SECONDS)
        if left and prefect_is_gone(api_url):
            break
    _undelivered = bool(left)


def exit_process(code: int) -> NoReturn:
    """End this process with an exit code, without waiting for events that could not be delivered."""
    if _undelivered or _ray_is_lost():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an ordinary exit would try to deliver each event for minutes, and ask Ray for another minute
    if "duckdb" not in sys.modules:  # its bindings report all that isn't freed as leaks
        gc.freeze()  # else Python looks for cycles among all that was imported: a second, for memory that goes anyway
    sys.exit(code)


def _ray_is_lost() -> bool:
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        return False
    from infra.ray.actors import require_ray

    try:
        require_ray()
    except RayLostError:
        return True
    return False
