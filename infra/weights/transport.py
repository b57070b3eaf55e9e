"""Which way weights travel."""

import logging
from functools import cache

from schemas.errors import ConfigError
from schemas.weights import Transport

logger = logging.getLogger(__name__)


@cache
def choose_transport(setting: str, gpus: tuple[str, ...]) -> Transport:
    """How a run's weights travel; it is said once.

    Args:
        setting: "auto", "object_store" or "broadcast".
        gpus: `gpu_of` the policy's first rank and of each rollout worker.

    Returns:
        What `setting` names; for "auto" a broadcast where each has a GPU of its own, else the object store.

    Raises:
        ConfigError: `setting` is none of these, or asks for a broadcast between workers that NCCL can't connect.
    """
    apart, on_cpu = "" not in gpus and len(set(gpus)) == len(gpus), not any(gpus)
    if setting == "auto":
        chosen: Transport = "broadcast" if apart else "object_store"
        logger.info("weights travel by %s: %s", chosen, "a GPU each" if apart else "not every worker has its own GPU")
        return chosen
    if setting == "object_store":
        return "object_store"
    if setting != "broadcast":
        raise ConfigError(f'runtime.weight_transport = {setting!r}; use "auto", "object_store" or "broadcast"')
    if not (apart or on_cpu):
        raise ConfigError(
            'runtime.weight_transport = "broadcast" needs a GPU of its own for the policy\'s first rank and for each '
            f'rollout worker, or all of them on the CPU, but they have {list(gpus)}; use "object_store"'
        )
    return "broadcast"
