"""What a worker holds in its device's memory, part by part, and its moves to host memory and back."""

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from rl_core.storages import EmptiedStorages, storage_bytes
from schemas.placement import MemoryChange, Part

Tensors = Callable[[], Iterable[Tensor]]  # those of a part that exist now


class Offload:
    """The parts of a worker, each in its device's memory or in host memory, as whole.

    Args:
        parts: The tensors of each part; empty before the worker has loaded.
    """

    def __init__(self, parts: Mapping[Part, Tensors]) -> None:
        self._parts = parts
        self._emptied = {part: EmptiedStorages() for part in parts}

    def move_out(self, parts: Collection[Part]) -> MemoryChange:
        """Copy parts to host memory and free them; nothing may use them until they are moved in again."""
        return self._change({part: self._move_out(part) for part in parts if part in self._parts})

    def move_in(self, parts: Collection[Part]) -> MemoryChange:
        """Copy parts back, bit for bit.

        Raises:
            torch.OutOfMemoryError: The device has too little memory for them; they stay where they are.
        """
        return self._change({part: self._emptied[part].move_in() for part in parts if part in self._parts})

    def _move_out(self, part: Part) -> int:
        emptied = self._emptied[part]
        return emptied.move_out(self._parts[part](), keep_values=True) if emptied.is_empty else 0

    def _change(self, moved: dict[Part, int]) -> MemoryChange:
        return MemoryChange(moved=moved, resident={part: storage_bytes(of()) for part, of in self._parts.items()})
