"""Cancelling a run from the Prefect UI.

Prefect only writes the request to the flow run's state. For the runs of deployments the worker or `sluice serve` reads
it and terminates the run's process, but only once for each flow run. So every run reads it itself, too: one that was
started in a terminal, and one that is cancelled again after a retry.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.watched import unless

POLL_SECONDS = 2.0

Result = TypeVar("Result")


async def cancellable(work: Coroutine[Any, Any, Result]) -> Result | State:
    """Await `work`; if the flow run is cancelled in the UI, cancel it, await its clean-up, and return `Cancelled`."""
    return await unless(_cancellation_requested(), work)


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
