"""Sync rollout workers to a policy version: weights go from worker to worker, never through the driver.

How they are sent is chosen by where the workers are.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from infra.ray.actors import call
from infra.ray.ranks import WorkerGroup
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, WorkerLostError
from schemas.weights import Transport, WeightGroupMember, WeightsRoute, WeightsTransfer

logger = logging.getLogger(__name__)


class _Group(NamedTuple):
    """A weight group whose members all took part in the last transfer."""

    workers: tuple[Any, ...]  # the rollout workers' actors; one that was started again is another actor
    route: WeightsRoute


_groups: dict[tuple[Any, ...], _Group] = {}  # the one that each policy sends in, by its ranks' actors
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def choose_route(setting: str, members: Sequence[WeightGroupMember]) -> WeightsRoute:
    """Choose how weights are sent to some rollout workers.

    Args:
        setting: "auto", "shared_memory" or "broadcast".
        members: The policy's rank 0, and the rollout workers, whose engines have one dtype.

    Returns:
        The transport that `setting` names. For "auto", broadcast by NCCL if each worker has its own GPU, else shared
        memory if all are on one node, else broadcast by gloo; the choice is logged once.

    Raises:
        ConfigError: `setting` is unknown, or asks for shared memory between nodes.
    """
    (dtype,) = {member.dtype for member in members[1:]}
    gpus = tuple(member.gpu for member in members)
    transport, on_gpus = _choose(setting, gpus, len({member.node for member in members}))
    return WeightsRoute(transport=transport, on_gpus=on_gpus, dtype=dtype)


@cache
def _choose(setting: str, gpus: tuple[str, ...], num_nodes: int) -> tuple[Transport, bool]:
    own_gpus = "" not in gpus and len(set(gpus)) == len(gpus)
    if setting == "auto":
        chosen: Transport = "shared_memory" if num_nodes == 1 and not own_gpus else "broadcast"
        gpu_reason = f"{'every' if own_gpus else 'not every'} worker has its own GPU"
        backend = "" if chosen == "shared_memory" else " by NCCL" if own_gpus else " by gloo"
        logger.info("weight transport: %s%s (%s, nodes: %d)", chosen, backend, gpu_reason, num_nodes)
        return chosen, chosen == "broadcast" and own_gpus
    if setting == "broadcast":
        return "broadcast", own_gpus
    if setting != "shared_memory":
        raise ConfigError(f'weights.transport = {setting!r}; use "auto", "shared_memory" or "broadcast"')
    if num_nodes > 1:
        raise ConfigError(
            f'weights.transport = "shared_memory", but the policy and its rollout workers are on {num_nodes} '
            'nodes; use "auto" or "broadcast"'
        )
    return "shared_memory", False


async def sync_weights(
    config: RunConfig,
    version: int,
    workers: Sequence[Any],
    find_policy: Callable[[], WorkerGroup | None],
    get_policy: Callable[[], Awaitable[WorkerGroup]],
) -> WeightsTransfer | None:
    """Load a version in place into the rollout workers that don't hold it; return the transfer, None if all hold it.

    Calls take turns: the policy sends in one group at a time.

    Args:
        config: The run's configuration.
        version: The policy version.
        workers: The rollout workers' actor handles.
        find_policy: Finds the policy's ranks without a call of them; called only if a worker needs the version.
        get_policy: Has them checked, or created; called only if they have not sent to these workers before.

    Raises:
        VersionError: The policy holds neither that version nor the one after it.
        WeightsError: The weights arrived damaged, or don't fit the engine's model, or it computes with others.
        WorkerLostError: A worker died.
    """
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        states = await asyncio.gather(*(call(worker, "weight_group_member") for worker in workers))
        stale = {worker: state for worker, state in zip(workers, states, strict=True) if state.version != version}
        if not stale:
            return None
        policy = find_policy()
        group = _groups.pop(policy.ranks, None) if policy else None  # if this fails, a member may have left it
        if policy is None or group is None or group.workers != tuple(stale):
            policy = await get_policy()
            group = await _form_group(config, policy.ranks[0], stale)
        route = group.route.replace(is_complete=any(state.version is None for state in stale.values()))
        sends = (call(rank, "send_weights", version, route) for rank in policy.ranks)
        loads = (call(worker, "load_weights", version, route.transport) for worker in stale)
        outcomes = await asyncio.gather(*sends, *loads, return_exceptions=True)
        if any(isinstance(outcome, WorkerLostError) for outcome in outcomes[1 : len(policy.ranks)]):
            policy.kill_after_error()  # its ranks have lost each other, not only a receiver
        results = _results(outcomes)
        _groups[policy.ranks] = group
        return WeightsTransfer.of(route.transport, results[0], results[len(policy.ranks) :])


async def _form_group(config: RunConfig, sender: Any, workers: Mapping[Any, WeightGroupMember]) -> _Group:
    """Choose the route from the policy's rank 0 to these workers, and have them join one group."""
    state, rendezvous = await asyncio.gather(
        call(sender, "weight_group_member"), call(sender, "open_weight_rendezvous", len(workers))
    )
    route, members = choose_route(config.weights.transport, [state, *workers.values()]), [sender, *workers]
    joins = (call(each, "init_weight_group", rendezvous, rank, route.on_gpus) for rank, each in enumerate(members))
    _results(await asyncio.gather(*joins, return_exceptions=True))
    return _Group(tuple(workers), route)


def _results(outcomes: Sequence[Any]) -> Sequence[Any]:
    """Return the results of calls; if some have failed, raise the error of one that did not just lose the others."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, WorkerLostError))
    return outcomes
