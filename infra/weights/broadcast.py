"""The broadcast transport: from the policy's rank 0 to all rollout workers, in a `WeightGroup`.

A broadcast consists of: two int64, the number of bytes of the handle and of a bucket; the handle as JSON, without its
checksum; the flat buffer in buckets, of which the last may be smaller; and the checksum. The sender holds one bucket, a
receiver the whole buffer.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from infra.engines.base import RolloutEngine
from infra.weights.base import load_verified
from infra.weights.checksum import Checksum
from infra.weights.group import WeightGroup
from infra.weights.layout import (
    buffer_as_tensor,
    check_version,
    flat_bytes,
    join_gather,
    make_handle,
    pair_with_slots,
)
from schemas.errors import WorkerLostError
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle

BUCKET_BYTES = 256 * 2**20
_SPARE_BYTES = 2**30  # of a GPU's memory, left for its engine if a buffer is allocated there
_CHECKSUM_BYTES = 64

logger = logging.getLogger(__name__)


class BroadcastSender:
    """A `WeightsSender` by broadcast.

    Args:
        run_id: The run whose weights it sends.
        group: The group, of which it is member 0.
        bucket_bytes: The size of a bucket, a multiple of 64.
    """

    def __init__(self, run_id: str, group: WeightGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._run_id, self.group, self._bucket_bytes = run_id, group, bucket_bytes

    def send(self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """Broadcast a version's tensors; see `WeightsSender.send`."""
        started, remaining = time.perf_counter(), iter(tensors)
        handle = make_handle(self._run_id, version, specs, "")
        try:
            with self.group.leave_on_error():
                checksum = self._send(handle, remaining)
        except WorkerLostError:
            join_gather(remaining)  # the policy's other ranks gather all tensors, even if a receiver is lost
            raise
        return SentWeights(handle=handle.replace(checksum=checksum), seconds=time.perf_counter() - started)

    def _send(self, handle: WeightsHandle, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Broadcast everything, and return the checksum."""
        device, total = self.group.device, Checksum()
        head = buffer_as_tensor(handle.model_dump_json().encode())
        self.group.broadcast(torch.tensor([head.numel(), self._bucket_bytes], device=device))
        self.group.broadcast(head.to(device))
        bucket = torch.empty(min(self._bucket_bytes, handle.num_bytes), dtype=torch.uint8, device=device)
        for filled in _fill_buckets(bucket, handle.tensors, tensors):
            total.update(filled)
            self.group.broadcast(filled)
        self.group.broadcast(buffer_as_tensor(total.hexdigest().encode()).to(device))
        return total.hexdigest()


class BroadcastReceiver:
    """A `WeightsReceiver` by broadcast.

    Args:
        run_id: The run whose weights it accepts.
        group: The group, of which it is member 1 or higher.
    """

    def __init__(self, run_id: str, group: WeightGroup) -> None:
        self._run_id, self.group = run_id, group

    def load(self, engine: RolloutEngine, version: int, sent: SentWeights | None) -> LoadedWeights:
        """Receive and load a version; see `WeightsReceiver.load`. After a rejected version, the group stays usable."""
        started = time.perf_counter()
        with self.group.leave_on_error():
            handle, buffer = self._receive()
        check_version(handle, self._run_id, version)
        return load_verified(engine, handle, buffer, started)

    def _receive(self) -> tuple[WeightsHandle, Tensor]:
        sizes = self._receive_bytes(2 * torch.int64.itemsize).view(torch.int64)
        head_bytes, bucket_bytes = sizes.tolist()
        handle = WeightsHandle.model_validate_json(_decode(self._receive_bytes(head_bytes)))
        device = self.group.device
        buffer_device = _choose_buffer_device(device, handle.num_bytes + bucket_bytes)
        buffer = torch.empty(handle.num_bytes, dtype=torch.uint8, device=buffer_device)
        for part in buffer.split(bucket_bytes):
            if buffer.device == device:
                self.group.broadcast(part)
            else:
                part.copy_(self._receive_bytes(part.numel()))
        return handle.replace(checksum=_decode(self._receive_bytes(_CHECKSUM_BYTES))), buffer

    def _receive_bytes(self, num_bytes: int) -> Tensor:
        received = torch.empty(num_bytes, dtype=torch.uint8, device=self.group.device)
        self.group.broadcast(received)
        return received


def _fill_buckets(
    bucket: Tensor, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[Tensor]:
    """Yield the flat buffer in order: the same bucket again and again, and at the end its filled part."""
    filled = 0
    for part in _flat_parts(specs, tensors, bucket.device):
        while part.numel():
            fits = min(part.numel(), bucket.numel() - filled)
            bucket[filled : filled + fits].copy_(part[:fits])
            filled, part = filled + fits, part[fits:]
            if filled == bucket.numel():
                yield bucket
                filled = 0
    if filled:
        yield bucket[:filled]


def _flat_parts(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[Tensor]:
    """Yield each tensor's bytes, and the zeros between tensors."""
    end = 0
    for slot, tensor in pair_with_slots(specs, tensors):
        yield torch.zeros(slot.offset - end, dtype=torch.uint8, device=device)
        yield tensor.contiguous().view(-1).view(torch.uint8)
        end = slot.offset + slot.num_bytes
    yield torch.zeros(flat_bytes(specs) - end, dtype=torch.uint8, device=device)


def _choose_buffer_device(device: torch.device, num_bytes: int) -> torch.device:
    """Return where a receiver allocates the buffer: on its GPU if it fits next to the engine, else in host memory."""
    if device.type == "cpu" or torch.cuda.mem_get_info(device)[0] >= num_bytes + _SPARE_BYTES:
        return device
    logger.info("the GPU has no space for %d more bytes: the weights are received in host memory", num_bytes)
    return torch.device("cpu")


def _decode(characters: Tensor) -> str:
    return bytes(characters.tolist()).decode()
