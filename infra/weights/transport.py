"""The choice of the weight transport."""

import logging
from functools import cache

from schemas.errors import ConfigError
from schemas.weights import Transport

logger = logging.getLogger(__name__)


@cache
def choose_transport(setting: str, gpus: tuple[str, ...]) -> Transport:
    """Choose a run's weight transport; an automatic choice is logged once.

    Args:
        setting: "auto", "shared_memory" or "broadcast".
        gpus: `gpu_of` the policy's rank 0 and of each rollout worker.

    Returns:
        The transport that `setting` names; for "auto", broadcast if each worker has its own GPU, else shared memory.

    Raises:
        ConfigError: `setting` is unknown, or asks for a broadcast between workers that NCCL can't connect.
    """
    own_gpus, on_cpu = "" not in gpus and len(set(gpus)) == len(gpus), not any(gpus)
    if setting == "auto":
        chosen: Transport = "broadcast" if own_gpus else "shared_memory"
        reason = "every worker has its own GPU" if own_gpus else "not every worker has its own GPU"
        logger.info("weight transport: %s (%s)", chosen, reason)
        return chosen
    if setting == "shared_memory":
        return "shared_memory"
    if setting != "broadcast":
        raise ConfigError(f'runtime.weight_transport = {setting!r}; use "auto", "shared_memory" or "broadcast"')
    if not (own_gpus or on_cpu):
        raise ConfigError(
            'runtime.weight_transport = "broadcast" needs a GPU of its own for the policy\'s rank 0 and for each '
            f'rollout worker, or all of them on the CPU, but they have {list(gpus)}; use "shared_memory"'
        )
    return "broadcast"
