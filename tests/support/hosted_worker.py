"""A worker in a module that imports torch."""

import logging

import torch

from schemas.errors import ModelError

logger = logging.getLogger("infra.hosted")


class Worker:
    def __init__(self, number: int) -> None:
        self._number = torch.tensor(number)

    def add(self, other: int) -> int:
        return int(self._number + other)

    def report(self, num_lines: int) -> int:
        logging.getLogger("elsewhere").info("not ours, and no warning")
        logging.getLogger("elsewhere").warning("not ours, but a warning")
        for number in range(num_lines):
            logger.info("line %d", number)
        return num_lines

    def fail(self) -> None:
        logger.warning("about to fail")
        raise ModelError("no such model")

    def exhaust(self) -> None:
        """Fail as torch does on a GPU without free memory."""
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 79.10 GiB.\nSee the docs.")
