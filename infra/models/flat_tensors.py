"""Tensors as one flat buffer: in the given order, each at a multiple of 64 bytes, zeros between.

Nothing here makes a second copy of the whole: tensors are written to the buffer one by one, and read as views.
"""

import math
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schemas.errors import WeightsError
from schemas.weights import TensorSpec

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class TensorSlot:
    """A tensor's place in the buffer: `num_bytes` from `offset` on."""

    spec: TensorSpec
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return _dtype(self.spec)


def tensor_specs(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors; for sharded ones, of the whole tensors. Moves no data."""
    return tuple(
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def assign_slots(specs: Sequence[TensorSpec]) -> list[TensorSlot]:
    """Return each tensor's slot.

    Raises:
        WeightsError: A dtype is not one of torch's, or a name is duplicated.
    """
    if len(names := [spec.name for spec in specs]) != len(set(names)):
        raise WeightsError(
            f"tensor {next(n for n in names if names.count(n) > 1)!r} is duplicated; each name must be unique"
        )
    found, offset = [], 0
    for spec in specs:
        num_bytes = math.prod(spec.shape) * _dtype(spec).itemsize
        found.append(TensorSlot(spec, offset, num_bytes))
        offset += _padded(num_bytes)
    return found


def flat_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of the buffer, a multiple of 64 bytes and at least 64."""
    return max(ALIGNMENT, sum(_padded(slot.num_bytes) for slot in assign_slots(specs)))


def pair_with_slots(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[TensorSlot, Tensor]]:
    """Yield each tensor with its slot.

    Raises:
        WeightsError: The tensors don't match `specs`.
    """
    slots = iter(assign_slots(specs))
    for name, tensor in tensors:
        slot, given = next(slots, None), tensor_specs({name: tensor})[0]
        if slot is None or slot.spec != given:
            expected = "no more tensors" if slot is None else slot.spec
            raise WeightsError(f"the tensors to publish don't match their specs: got {given}, expected {expected}")
        yield slot, tensor.detach()
    if (missing := next(slots, None)) is not None:
        raise WeightsError(f"the tensors to publish don't match their specs: {missing.spec.name!r} is missing")


def write_tensors(target: Tensor, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors to a flat buffer, one by one.

    Args:
        target: uint8 [flat_bytes(specs)], writable; all of it is overwritten.
        specs: The tensors' specs, in order.
        tensors: The whole tensors by name, in the same order, on any device.

    Raises:
        WeightsError: The tensors don't match `specs`.
    """
    end = 0
    for slot, tensor in pair_with_slots(specs, tensors):
        target[end : slot.offset] = 0
        end = slot.offset + slot.num_bytes
        target[slot.offset : end].view(slot.dtype).view(slot.spec.shape).copy_(tensor)
    target[end:] = 0


def tensor_views(buffer: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors of a flat buffer, uint8 [flat_bytes(specs)], by name: views of its memory, on its device."""
    return {
        slot.spec.name: buffer[slot.offset : slot.offset + slot.num_bytes].view(slot.dtype).view(slot.spec.shape)
        for slot in assign_slots(specs)
    }


def buffer_as_tensor(memory: Any) -> Tensor:
    """Return uint8 [n], n >= 1, over any object with a buffer, without a copy; don't write to read-only memory."""
    with warnings.catch_warnings():  # torch has no read-only tensors, and warns each time
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memoryview(memory), dtype=torch.uint8)


@contextmanager
def shared_tensors(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Write tensors to memory that other processes of this machine can map, and provide its path during the block.

    Each call has memory of its own, which stays as long as anyone maps it: vLLM keeps a bucket until a layer has all of
    its tensors, some of which may be in the next one.

    Raises:
        WeightsError: No memory is left.
    """
    num_bytes = flat_bytes(specs)
    descriptor = os.memfd_create("weights")  # without a name, it ends with the last process that has it
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        write_tensors(buffer_as_tensor(mmap.mmap(descriptor, num_bytes)), specs, tensors.items())
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    except OSError as error:
        raise WeightsError(
            f"no shared memory for a bucket of {num_bytes} bytes of weights: {error.strerror}; lower "
            "weights.bucket_bytes"
        ) from None
    finally:
        os.close(descriptor)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(
            f"tensor {spec.name!r} has the dtype {spec.dtype!r}, which torch doesn't have; use a torch dtype"
        )
    return dtype
