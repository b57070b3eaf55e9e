"""The choice of how weights are sent."""

import logging
from collections.abc import Sequence
from functools import cache

from schemas.errors import ConfigError
from schemas.weights import Transport, WeightGroupMember, WeightsRoute

logger = logging.getLogger(__name__)


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
        raise ConfigError(f'runtime.weight_transport = {setting!r}; use "auto", "shared_memory" or "broadcast"')
    if num_nodes > 1:
        raise ConfigError(
            f'runtime.weight_transport = "shared_memory", but the policy and its rollout workers are on {num_nodes} '
            'nodes; use "auto" or "broadcast"'
        )
    return "shared_memory", False
