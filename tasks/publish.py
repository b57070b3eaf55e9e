"""Publish: the policy's weights go from worker to worker, never through the driver."""

import asyncio
from typing import Any

from infra.cluster import call, get_worker
from infra.group import get_group
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import operation


@operation("publish")
async def publish_weights(run: RunHandle, policy: PolicyHandle) -> None:
    """Load the policy's version into every rollout worker, in place."""
    numbers = range(run.config.rollout.num_workers)
    workers = await asyncio.gather(*(get_worker(run, "rollout", number) for number in numbers))
    await bring_to(run, policy.version, *workers)


async def bring_to(run: RunHandle, version: int, *workers: Any) -> None:
    """Bring rollout workers to a version of the policy; nothing moves to those that hold it already.

    Raises:
        VersionError: The policy's workers hold neither that version nor the one after it.
    """
    held = await asyncio.gather(*(call(worker, "version") for worker in workers))
    behind = [worker for worker, own in zip(workers, held, strict=True) if own != version]
    if not behind:
        return
    group = await get_group(run, "policy")
    # Ray hands the bytes from one worker to the others: the driver passes on a promise of them.
    weights, others = group.promise("weights", version)
    await asyncio.gather(*(call(worker, "load_weights", weights, version) for worker in behind), others)
