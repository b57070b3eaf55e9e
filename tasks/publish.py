"""Publish: the policy's weights go from worker to worker, never through the driver."""

import asyncio
from collections.abc import Sequence
from typing import Any

from infra.cluster import answer, call, get_worker
from infra.group import WorkerGroup, get_group
from infra.stores.plasma import address
from infra.weights.transport import choose_transport
from schemas.step import PolicyHandle, RunHandle
from schemas.weights import Transport, WeightsTransfer
from tasks.stage import operation


@operation("publish")
async def publish_weights(run: RunHandle, policy: PolicyHandle) -> WeightsTransfer | None:
    """Load the policy's version into every rollout worker, in place; None: all of them hold it already."""
    numbers = range(run.config.rollout.num_workers)
    workers = await asyncio.gather(*(get_worker(run, "rollout", number) for number in numbers))
    return await bring_to(run, policy.version, *workers)


async def bring_to(run: RunHandle, version: int, *workers: Any) -> WeightsTransfer | None:
    """Bring rollout workers to a version of the policy; nothing moves to those that hold it already.

    Raises:
        VersionError: The policy's workers hold neither that version nor the one after it.
        WeightsError: What arrived is damaged, or doesn't fit the engine's model.
        WorkerLostError: A worker died.
    """
    held = await asyncio.gather(*(call(worker, "version") for worker in workers))
    behind = [worker for worker, own in zip(workers, held, strict=True) if own != version]
    if not behind:
        return None
    group = await get_group(run, "policy")
    transport = await _choose_transport(run, group, behind)
    # The workers are given promises of what the policy's first rank returns: the driver only passes these on.
    promised, others = group.promise("send_weights", version, transport, address())
    loads = (call(worker, "load_weights", version, promised, transport) for worker in behind)
    loaded, *_ = await asyncio.gather(asyncio.gather(*loads), others)
    return WeightsTransfer.of(transport, await answer(promised[1], "send_weights"), loaded)


async def _choose_transport(run: RunHandle, group: WorkerGroup, workers: Sequence[Any]) -> Transport:
    """How weights travel to these workers; a group that broadcasts is gathered first, unless they are in one.

    It broadcasts to all rollout workers or not at all: one that is behind, alone, is served by the object store.
    """
    setting = run.config.runtime.weight_transport
    if setting == "object_store" or len(workers) < run.config.rollout.num_workers:
        return "object_store"
    sender, *_ = group.ranks
    ends = [sender, *workers]
    members = await asyncio.gather(*(call(end, "weights_member") for end in ends))
    transport = choose_transport(setting, tuple(member.gpu for member in members))
    groups = {member.group_id for member in members}
    if transport == "broadcast" and (len(groups) > 1 or "" in groups):
        meeting = await call(sender, "open_weights_meeting", len(workers))
        await asyncio.gather(*(call(end, "join_weights_group", meeting, rank) for rank, end in enumerate(ends)))
    return transport
