"""The operations that give shared GPUs' memory to the next phase of a step."""

from infra.workers import colocation
from schemas.placement import PhaseMemory
from schemas.step import RunHandle
from tasks.stage import operation


@operation("enter-scoring")
async def enter_scoring(run: RunHandle) -> PhaseMemory:
    """Have the engines sleep, and bring the weights of policy and reference into memory."""
    return await colocation.enter_scoring(run)


@operation("enter-update")
async def enter_update(run: RunHandle) -> PhaseMemory:
    """Move the reference out, and bring all of the policy into memory."""
    return await colocation.enter_update(run)
