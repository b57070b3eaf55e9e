"""The operations that open, clear and archive a step's columns."""

from prefect import get_run_logger

from infra.stores.steps import archive_step, clear_step, open_step
from schemas.step import RunHandle
from tasks.stage import operation


@operation("lease")
async def open_columns(run: RunHandle, step: int) -> None:
    """Open the step's lease; drop its committed stages if their columns are lost."""
    open_step(run, step, get_run_logger())


@operation("clear")
async def clear_columns(run: RunHandle, step: int) -> int:
    """Free the step's columns; return the bytes freed. Clearing twice is harmless."""
    return clear_step(run, step)


@operation("archive")
async def archive_columns(run: RunHandle, step: int) -> None:
    """End a finished step's lease; a durable store keeps its columns until a checkpoint includes its update."""
    archive_step(run, step)
