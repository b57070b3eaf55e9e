"""Clear: a step's ledger entries and columns go, in this order, so that no entry outlives its columns."""

from pathlib import Path

from infra.runs import RunDirectory
from infra.stores.ray import RayColumnStore
from schemas.step import RunHandle
from tasks.stage import operation


@operation("clear")
async def clear_columns(run: RunHandle, step: int) -> int:
    """Free the step's columns; returns the bytes freed. Clearing twice is harmless."""
    RunDirectory(Path(run.directory)).forget_step(step)
    return RayColumnStore(run.run_id).clear(run.run_id, step)
