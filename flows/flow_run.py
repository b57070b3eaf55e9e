"""The name and the state of the current flow run, as the Prefect UI shows them."""

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run


async def rename_flow_run(name: str) -> None:
    """Give the current flow run a name."""
    async with get_client() as client:
        await client.update_flow_run(UUID(flow_run.id), name=name)


async def set_state(state: State) -> None:
    """Give the current flow run a state."""
    async with get_client() as client:
        await client.set_flow_run_state(UUID(flow_run.id), state, force=True)
