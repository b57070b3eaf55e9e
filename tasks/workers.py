"""Workers: the run's Ray actors, started together."""

from infra.workers.launch import start_workers
from schemas.step import RunHandle
from tasks.stage import operation


@operation("start-workers")
async def start_all_workers(run: RunHandle) -> None:
    """Start the policy's and the reference's ranks and the rollout workers at the same time; existing ones stay."""
    await start_workers(run)
