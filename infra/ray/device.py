"""The device of a worker, chosen when it starts, and its number of threads."""

import logging
import os

import torch

logger = logging.getLogger(__name__)


def choose_device() -> torch.device:
    """Return the process's CUDA device if it was assigned a GPU, else the CPU."""
    if not torch.cuda.is_available():
        logger.info("computing on the CPU, with %d threads", torch.get_num_threads())
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    logger.info("computing on %s", torch.cuda.get_device_name(device))
    return device


def set_threads(num_threads: int) -> None:
    """Give torch `num_threads` threads, or all of the machine's cores for 0."""
    torch.set_num_threads(num_threads or os.cpu_count() or 1)
