"""Cancelling a run from the Prefect UI, and terminating its process.

Prefect only writes the request to the flow run's state. For the runs of deployments the worker or `sluice serve` reads
it and terminates the run's process, but only once for each flow run. So every run reads it itself, too: one that was
started in a terminal, and one that is cancelled again after a retry.

A SIGTERM is turned into an exception by Prefect, which is raised wherever the main thread is. In a callback of the
event loop that is where it ends: asyncio logs it and goes on. So every run also learns of the signal in its own turn.
"""

import asyncio
import signal
import socket
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.watched import unless

POLL_SECONDS = 2.0
MAX_SIGNALS = 4096  # read at a time

Result = TypeVar("Result")


async def cancellable(work: Coroutine[Any, Any, Result]) -> Result | State:
    """Await `work`; if the flow run is cancelled in the UI, cancel it, await its clean-up, and return `Cancelled`.

    Raises:
        TerminationSignal: The process was terminated; `work` was cancelled, and has cleaned up.
    """
    return await unless(_cancellation_requested(), terminable(work))


async def terminable(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; if the process is terminated, cancel it, and await its clean-up.

    Raises:
        TerminationSignal: The process was terminated.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal is handled in another one
        return await work
    reader, writer = socket.socketpair()
    with reader, writer:
        for end in (reader, writer):
            end.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            return await unless(_terminated(reader), work)
        finally:
            signal.set_wakeup_fd(before)


async def _terminated(signals: socket.socket) -> NoReturn:
    """Raise `TerminationSignal` when a SIGTERM is among the numbers of signals that a socket receives."""
    while signal.SIGTERM not in await asyncio.get_running_loop().sock_recv(signals, MAX_SIGNALS):
        pass
    raise TerminationSignal(signal.SIGTERM)


async def _cancellation_requested() -> State:
    """Return `Cancelled` when somebody has cancelled the flow run."""
    async with get_client() as client:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                state = (await client.read_flow_run(UUID(flow_run.id))).state
            except (httpx.HTTPError, PrefectException):  # the server is gone for a while; the run goes on without it
                continue
            if state is not None and state.is_cancelling():
                return Cancelled(message="cancelled in the Prefect UI; the run can be resumed")
