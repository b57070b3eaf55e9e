"""A worker in a module that imports torch."""

import torch

from schemas.errors import ModelError


class Worker:
    def __init__(self, number: int) -> None:
        self._number = torch.tensor(number)

    def add(self, other: int) -> int:
        return int(self._number + other)

    def two(self) -> tuple[int, int]:
        return self.add(0), self.add(1)

    def fail(self) -> None:
        raise ModelError("no such model")
