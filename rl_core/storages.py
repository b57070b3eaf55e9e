"""Tensors whose memory is given up for a while, in place: nobody who has one of them notices when it is back.

Their storages are resized, as FSDP itself does with gathered weights. So shapes, strides, ties between tensors, and
shards that FSDP views in another way stay as they are, on every device.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from rl_core.training.sharding import local_tensor
from schemas.placement import MemoryChange, Part

Tensors = Callable[[], Iterable[Tensor]]  # those of a part that exist now


@dataclass(frozen=True)
class _Emptied:
    """A storage without memory, its bytes, and their copy in host memory: uint8 [n]; None: they were dropped."""

    storage: UntypedStorage
    num_bytes: int
    copy: Tensor | None


class EmptiedStorages:
    """The storages that one holder of tensors has emptied; none at first."""

    def __init__(self) -> None:
        self._emptied: list[_Emptied] = []

    @property
    def is_empty(self) -> bool:
        """Whether all of the tensors have their memory."""
        return not self._emptied

    def move_out(self, tensors: Iterable[Tensor], *, keep_values: bool) -> int:
        """Give up the memory of tensors, of sharded ones this rank's part; return the bytes on their device.

        Until `move_in`, they must not be read or written.

        Args:
            tensors: On any device; those that share memory are emptied once.
            keep_values: Whether their values are copied to host memory, or dropped.
        """
        total = 0
        for storage in unique_storages(tensors):
            if storage.device.type == "cuda":
                torch.cuda.synchronize(storage.device)  # other streams may still use it
            copy = _copy_of(storage) if keep_values else None
            self._emptied.append(_Emptied(storage, storage.nbytes(), copy))
            total += storage.nbytes()
            storage.resize_(0)
        release_cached()
        return total

    def move_in(self) -> int:
        """Give all tensors their memory, with the values that were kept, bit for bit; return the bytes.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; the rest can be moved in later.
        """
        total = 0
        while self._emptied:
            each = self._emptied[-1]
            each.storage.resize_(each.num_bytes)
            if each.copy is not None:
                _bytes_of(each.storage).copy_(each.copy)
            total += each.num_bytes
            self._emptied.pop()
        return total


def unique_storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages of tensors that have memory, each once; of a sharded tensor, that of this rank's part."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = local_tensor(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors take on their device."""
    return sum(storage.nbytes() for storage in unique_storages(tensors))


def release_cached() -> None:
    """Give the GPU memory that torch keeps for later back to the other processes of the GPU; no-op without one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _copy_of(storage: UntypedStorage) -> Tensor:
    # Pageable: torch would round pinned memory up to a power of two, and keep it.
    return torch.empty(storage.nbytes(), dtype=torch.uint8).copy_(_bytes_of(storage))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
