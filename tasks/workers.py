"""The operation that starts the run's Ray actors."""

from infra.workers.launch import start_workers
from schemas.placement import WorkerPlace
from schemas.step import RunHandle
from tasks.stage import operation


@operation("start-workers")
async def start_all_workers(run: RunHandle) -> list[WorkerPlace]:
    """Start the policy's and the reference's ranks and the rollout workers in parallel; keep existing ones."""
    return await start_workers(run)
