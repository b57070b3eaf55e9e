"""Sync rollout workers to a policy version: weights go from worker to worker, never through the driver."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from infra.ray.actors import call
from infra.ray.group import WorkerGroup
from infra.weights.transport import choose_transport
from schemas.config.run import RunConfig
from schemas.weights import LoadedWeights, SentWeights, Transport, WeightsTransfer


async def sync_weights(
    config: RunConfig, version: int, workers: Sequence[Any], get_policy: Callable[[], Awaitable[WorkerGroup]]
) -> WeightsTransfer | None:
    """Load a policy version into the rollout workers that don't hold it yet, in place.

    Args:
        config: The run's configuration.
        version: The policy version.
        workers: The rollout workers' actor handles.
        get_policy: Finds the policy's ranks; called only if a worker needs the version.

    Returns:
        The measured transfer; None if all workers hold the version already.

    Raises:
        VersionError: The policy holds neither that version nor the one after it.
        WeightsError: The weights arrived damaged, or don't fit the engine's model.
        WorkerLostError: A worker died.
    """
    held = await asyncio.gather(*(call(worker, "version") for worker in workers))
    stale = [worker for worker, own in zip(workers, held, strict=True) if own != version]
    if not stale:
        return None
    policy = await get_policy()
    transport = await _prepare_transport(config, policy, stale)
    sends = [call(rank, "send_weights", version, transport) for rank in policy.ranks]
    if transport == "broadcast":
        (sent, *_), loaded = await asyncio.gather(asyncio.gather(*sends), _load(stale, version, None, transport))
    else:
        sent, *_ = await asyncio.gather(*sends)
        loaded = await _load(stale, version, sent, transport)
        await call(policy.ranks[0], "drop_sent_weights", sent.file)
    return WeightsTransfer.of(transport, sent, loaded)


async def _load(
    workers: Sequence[Any], version: int, sent: SentWeights | None, transport: Transport
) -> list[LoadedWeights]:
    return await asyncio.gather(*(call(worker, "load_weights", version, sent, transport) for worker in workers))


async def _prepare_transport(config: RunConfig, policy: WorkerGroup, workers: Sequence[Any]) -> Transport:
    """Choose the transport to these workers; for a broadcast, form the weight group unless it exists.

    Weights are broadcast to all rollout workers or to none: a subset of them is served through shared memory.
    """
    setting = config.runtime.weight_transport
    if setting == "shared_memory" or len(workers) < config.rollout.num_workers:
        return "shared_memory"
    sender, *_ = policy.ranks
    members = [sender, *workers]
    states = await asyncio.gather(*(call(member, "weight_group_member") for member in members))
    transport = choose_transport(setting, tuple(state.gpu for state in states))
    groups = {state.group_id for state in states}
    if transport == "broadcast" and (len(groups) > 1 or "" in groups):
        rendezvous = await call(sender, "open_weight_rendezvous", len(workers))
        joins = (call(member, "init_weight_group", rendezvous, rank) for rank, member in enumerate(members))
        await asyncio.gather(*joins)
    return transport
