"""The device and the threads of a worker's process: the driver decides them, and the worker computes nowhere else."""

import functools
import logging
import os
from typing import TYPE_CHECKING

from schemas.errors import ConfigError
from schemas.placement import WorkerPlace, WorkerSlot

if TYPE_CHECKING:
    import torch

_slot: WorkerSlot | None = None  # of this process; None outside of workers

logger = logging.getLogger(__name__)


def occupy(slot: WorkerSlot) -> None:
    """Take the place that the driver decided for this process; before torch is imported, so that it sees no other GPU.

    Raises:
        ConfigError: Ray gave this process another number of GPUs.
    """
    import ray

    global _slot
    given = ray.get_gpu_ids()
    if len(given) != slot.num_gpus:
        what = f"{slot.num_gpus} GPUs" if slot.num_gpus else "the CPU"
        raise ConfigError(f"worker {slot.worker} is to compute on {what}, but Ray gave it GPUs {given}")
    if slot.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides them only from workers that have some
    _slot = slot


def choose_device() -> "torch.device":
    """Return this process's `torch.device`: the one decided for this worker, the first of several; else CUDA if torch
    has it.

    Raises:
        ConfigError: Torch can't use the GPUs that this worker was given.
    """
    import torch

    seen = torch.cuda.device_count()
    if _slot is not None and _slot.num_gpus != seen:
        raise ConfigError(
            f"worker {_slot.worker} is to compute on {_slot.device} with {_slot.num_gpus} GPUs, but torch "
            f"{torch.__version__} sees {seen} on node {_slot.address}; install a build of torch for that node's "
            'driver, or set runtime.device = "cpu"'
        )
    device = torch.device("cuda", torch.cuda.current_device()) if seen else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if seen else f"the CPU, with {torch.get_num_threads()} threads"
    _say(name)
    return device


@functools.cache
def _say(name: str) -> None:
    """Log where this process computes, once: an engine asks for the device as well as the worker that it is in."""
    logger.info("computing on %s", name)


def place_of_process(slot: WorkerSlot) -> WorkerPlace:
    """Return where this process computes, which has that slot and has started."""
    import ray
    import torch

    gpus = ", ".join(f"GPU {number}" for number in ray.get_gpu_ids())
    node = f"{slot.address} ({slot.node[:8]})"
    return WorkerPlace(worker=slot.worker, node=node, device=gpus or "CPU", threads=torch.get_num_threads())


def set_threads(num_threads: int) -> None:
    """Give torch `num_threads` threads; for 0, this process's share of its machine's cores."""
    import torch

    sharing = _slot.sharing if _slot is not None else 1
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // sharing))
