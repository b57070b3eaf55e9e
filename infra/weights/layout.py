"""A policy version's tensors as one flat buffer: in their given order, each at a multiple of 64 bytes, zeros between.

Nothing here makes a second copy of the whole: tensors are written into the buffer one by one, and read as views.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infra.weights.checksum import checksum
from schemas.errors import WeightsError
from schemas.weights import TensorSpec, WeightsHandle

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: `num_bytes` from `offset` on."""

    spec: TensorSpec
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return _dtype(self.spec)


def tensor_specs(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """What tensors are like; of sharded ones, what the whole ones are like. Moves nothing."""
    return tuple(
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def assign_slots(specs: Sequence[TensorSpec]) -> list[Slot]:
    """Where each tensor lies.

    Raises:
        WeightsError: A dtype isn't one of torch's, or a name is there twice.
    """
    if len(names := [spec.name for spec in specs]) != len(set(names)):
        raise WeightsError(f"tensor {next(n for n in names if names.count(n) > 1)!r} is there twice; name it once")
    found, offset = [], 0
    for spec in specs:
        num_bytes = math.prod(spec.shape) * _dtype(spec).itemsize
        found.append(Slot(spec, offset, num_bytes))
        offset += _padded(num_bytes)
    return found


def flat_bytes(specs: Sequence[TensorSpec]) -> int:
    """The size of the buffer, a multiple of 64 bytes and at least that."""
    return max(ALIGNMENT, sum(_padded(slot.num_bytes) for slot in assign_slots(specs)))


def pair_with_slots(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[Slot, Tensor]]:
    """Yield each tensor with its place.

    Raises:
        WeightsError: What comes isn't what `specs` says.
    """
    places = iter(assign_slots(specs))
    for name, tensor in tensors:
        slot, given = next(places, None), tensor_specs({name: tensor})[0]
        if slot is None or slot.spec != given:
            expected = "no more tensors" if slot is None else slot.spec
            raise WeightsError(f"the tensors to publish are not as announced: {given} came, expected {expected}")
        yield slot, tensor.detach()
    if (missing := next(places, None)) is not None:
        raise WeightsError(f"the tensors to publish are not as announced: {missing.spec.name!r} did not come")


def join_gather(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Let all tensors come and keep none, for gathering them may be a collective: what the ranks do that don't send."""
    deque(tensors, maxlen=0)


def write_tensors(target: Tensor, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors into a flat buffer, one by one.

    Args:
        target: uint8 [flat_bytes(specs)], writable; what it held is overwritten.
        specs: What the tensors are like, in order.
        tensors: By name, in the same order, whole, on any device.

    Raises:
        WeightsError: What comes isn't what `specs` says.
    """
    end = 0
    for slot, tensor in pair_with_slots(specs, tensors):
        target[end : slot.offset] = 0
        end = slot.offset + slot.num_bytes
        target[slot.offset : end].view(slot.dtype).view(slot.spec.shape).copy_(tensor)
    target[end:] = 0


def tensor_views(buffer: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The tensors in a flat buffer, uint8 [flat_bytes(specs)], by name: views of its memory, on its device."""
    return {
        slot.spec.name: buffer[slot.offset : slot.offset + slot.num_bytes].view(slot.dtype).view(slot.spec.shape)
        for slot in assign_slots(specs)
    }


def make_handle(run_id: str, version: int, specs: Sequence[TensorSpec], checksum: str) -> WeightsHandle:
    """The handle of a buffer."""
    return WeightsHandle(
        run_id=run_id, version=version, tensors=tuple(specs), num_bytes=flat_bytes(specs), checksum=checksum
    )


def verify_buffer(handle: WeightsHandle, buffer: Tensor) -> None:
    """See that a buffer, uint8 [n], is what its handle says.

    Raises:
        WeightsError: It isn't.
    """
    what = f"the weights of version {handle.version} of run {handle.run_id}"
    if not handle.num_bytes == buffer.numel() == flat_bytes(handle.tensors):
        raise WeightsError(
            f"{what} came as {buffer.numel()} bytes, expected {handle.num_bytes}, and their tensors take "
            f"{flat_bytes(handle.tensors)}; nothing was loaded: publish them again"
        )
    if (found := checksum(buffer)) != handle.checksum:
        raise WeightsError(
            f"{what} arrived damaged: checksum {found}, expected {handle.checksum}; nothing was loaded: publish them "
            "again"
        )


def check_version(handle: WeightsHandle, run_id: str, version: int) -> None:
    """See that a handle is that of the asked version.

    Raises:
        WeightsError: It is of another run or version.
    """
    if (handle.run_id, handle.version) != (run_id, version):
        raise WeightsError(
            f"the weights of version {handle.version} of run {handle.run_id} came, expected version {version} of run "
            f"{run_id}; nothing was loaded: publish that version"
        )


def buffer_as_tensor(memory: Any) -> Tensor:
    """uint8 [n] over any object with a buffer, n >= 1, without a copy. Nobody may write to it if that is read-only."""
    with warnings.catch_warnings():  # torch has no read-only tensors, and says so each time
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memoryview(memory), dtype=torch.uint8)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"tensor {spec.name!r} has the dtype {spec.dtype!r}, which torch doesn't have")
    return dtype
