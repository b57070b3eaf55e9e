"""Turns of the runs that share GPUs: each holds a slot of its pool, which is a global concurrency limit in Prefect."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefect import get_run_logger
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.concurrency.asyncio import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Running

from flows.lifecycle.cancellation import set_state

SLOTS = 1  # of a new pool; a pool of several clusters' worth of GPUs may be given more in the Prefect UI
LEASE_SECONDS = 60  # after which the slot of a killed run is free again; the shortest that Prefect allows


def limit_name(pool: str) -> str:
    """Return the name of a pool's concurrency limit."""
    return f"sluice-{pool}"


@asynccontextmanager
async def hold_pool(pool: str) -> AsyncIterator[None]:
    """Hold a slot of the pool during the block; the flow run's state is `Queued` until one is free.

    A lost lease, e.g. while the Prefect server is gone, does not stop the block.
    """
    name = limit_name(pool)
    async with get_client() as client:
        is_full = await _is_full(client, name)
    if is_full:
        message = f"waiting for a slot of the pool {pool!r}, which another run holds"
        get_run_logger().info(message)
        await set_state(Running(name="Queued", message=message))
    holder = ConcurrencyLeaseHolder(type="flow_run", id=flow_run.id)
    async with concurrency(
        name, strict=True, lease_duration=LEASE_SECONDS, holder=holder, raise_on_lease_renewal_failure=False
    ):
        if is_full:
            await set_state(Running())
        yield


async def _is_full(client: PrefectClient, name: str) -> bool:
    """Return whether all slots are taken; create the limit if it doesn't exist."""
    try:
        limit = await client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=SLOTS))
        return False
    return limit.active_slots >= limit.limit
