"""Weights by a broadcast from the policy's first rank to the rollout workers: NCCL between GPUs, gloo between CPUs.

The members have a process group of their own, beside the one in which the policy's ranks train. A broadcast is: two
int64, the bytes of what follows and of a bucket; the handle as JSON, without its checksum; the flat buffer in buckets,
the last of which may be smaller; and the checksum. The sender holds one bucket, a receiver the buffer.
"""

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from infra.engines.base import RolloutEngine
from infra.ray.rendezvous import Rendezvous, listen_on
from infra.weights.base import ObjectRefs, load_verified
from infra.weights.checksum import Checksum
from infra.weights.layout import buffer_as_tensor, check_version, flat_bytes, join_gather, make_handle, pair_with_slots
from schemas.errors import WorkerLostError
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle

BUCKET_BYTES = 256 * 2**20
_SPARE_BYTES = 2**30  # of a GPU's memory, left for its engine when a buffer is placed there
_POLL_SECONDS = 0.0005
_CHECKSUM_BYTES = 64

logger = logging.getLogger(__name__)


def open_rendezvous(host: str, num_receivers: int) -> tuple[Rendezvous, ProcessGroupHandle]:
    """Where the members of a new group meet, at the policy's first rank, which keeps it as long as the group."""
    num_ranks = 1 + num_receivers
    meeting = Rendezvous(host, num_ranks)
    return meeting, ProcessGroupHandle(group_id=uuid.uuid4().hex, host=host, port=meeting.port, num_ranks=num_ranks)


class WeightGroup:
    """One member's end of the group. A failure ends it: the members then meet anew, as when they change.

    Attributes:
        group_id: Which group it is; empty once it has ended.
        device: Where broadcast tensors lie.
    """

    def __init__(
        self, group: ProcessGroupHandle, rank: int, host: str, device: torch.device, timeout_seconds: float
    ) -> None:
        """Join the others, and wait for them.

        Args:
            group: Where they meet.
            rank: 0 is the sender.
            host: This node's address: nothing listens on any other.
            device: This member's own GPU, or the CPU; all have the same kind.
            timeout_seconds: How long it waits for the others, here and in each broadcast.

        Raises:
            WorkerLostError: The others did not come in time.
        """
        self.group_id, self.device = group.group_id, device
        self._rank, self._timeout = rank, timeout_seconds
        listen_on(host)
        try:
            self._backend = self._meet(group, host)
        except (dist.DistError, RuntimeError) as error:
            raise WorkerLostError(f"member {rank} of {group.num_ranks} found no weights group: {error}") from None

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the receivers' tensor from the sender's, contiguous, on the group's device; returns when that is done.

        Raises:
            WorkerLostError: A member is gone, or did not come in time. The group has ended.
        """
        if not self.group_id:
            raise WorkerLostError("the weights group has ended; gather it anew")
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        try:
            self._finish(self._backend.broadcast([tensor], options))
        except (dist.DistError, RuntimeError) as error:
            self.end()
            raise WorkerLostError(f"member {self._rank} of the weights group lost the others: {error}") from None

    def end(self) -> None:
        """Leave the group; the others' broadcasts fail then, or time out."""
        if self.group_id:
            self.group_id = ""
            self._backend.abort()
            self._backend = None  # gloo closes its connections only now

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """Around what is broadcast: a member that fails on the way leaves, so that the others don't wait for it."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def _meet(self, group: ProcessGroupHandle, host: str) -> Any:
        timeout = timedelta(seconds=self._timeout)
        address = TCPStore(group.host, group.port, group.num_ranks, is_master=False, timeout=timeout)
        store = PrefixStore(group.group_id, address)
        store.set(f"member-{self._rank}", "")
        store.wait([f"member-{rank}" for rank in range(group.num_ranks)], timeout)  # NCCL would wait for ever
        if self.device.type == "cuda":
            return _nccl(store, self._rank, group.num_ranks, 2 * timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, self._rank, group.num_ranks, options)

    def _finish(self, work: Any) -> None:
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():  # not `wait`: with NCCL it only queues, on the CUDA stream
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait()


class BroadcastSender:
    """See `WeightsSender`; `owner` is not used, and the first of what is returned is empty.

    Args:
        run_id: The run whose weights it sends.
        group: It is member 0.
        bucket_bytes: A multiple of 64.
    """

    def __init__(self, run_id: str, group: WeightGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._run_id, self.group, self._bucket_bytes = run_id, group, bucket_bytes

    def send(
        self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], owner: bytes
    ) -> tuple[bytes, SentWeights]:
        """See `WeightsSender.send`."""
        started, left = time.perf_counter(), iter(tensors)
        handle = make_handle(self._run_id, version, specs, "")
        try:
            with self.group.ending_on_error():
                checksum = self._send(handle, left)
        except WorkerLostError:
            join_gather(left)  # a lost receiver must not take the policy's other ranks along, which gather them all
            raise
        return b"", SentWeights(handle=handle.replace(checksum=checksum), seconds=time.perf_counter() - started)

    def _send(self, handle: WeightsHandle, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Broadcast it all; returns the checksum."""
        device, total = self.group.device, Checksum()
        head = buffer_as_tensor(handle.model_dump_json().encode())
        self.group.broadcast(torch.tensor([head.numel(), self._bucket_bytes], device=device))
        self.group.broadcast(head.to(device))
        bucket = torch.empty(min(self._bucket_bytes, handle.num_bytes), dtype=torch.uint8, device=device)
        for part in _fill(bucket, handle.tensors, tensors):
            total.update(part)
            self.group.broadcast(part)
        self.group.broadcast(buffer_as_tensor(total.hexdigest().encode()).to(device))
        return total.hexdigest()


class BroadcastReceiver:
    """See `WeightsReceiver`; `refs` is not used.

    Args:
        run_id: The run whose weights it takes.
        group: It is one of the members from 1 on.
    """

    def __init__(self, run_id: str, group: WeightGroup) -> None:
        self._run_id, self.group = run_id, group

    def load(self, engine: RolloutEngine, version: int, refs: ObjectRefs) -> LoadedWeights:
        """See `WeightsReceiver.load`; what is refused was received whole, so the group goes on."""
        started = time.perf_counter()
        with self.group.ending_on_error():
            handle, buffer = self._receive()
        check_version(handle, self._run_id, version)
        return load_verified(engine, handle, buffer, started)

    def _receive(self) -> tuple[WeightsHandle, Tensor]:
        sizes = self._take(2 * torch.int64.itemsize).view(torch.int64)
        head_bytes, bucket_bytes = sizes.tolist()
        handle = WeightsHandle.model_validate_json(_text(self._take(head_bytes)))
        device = self.group.device
        buffer = torch.empty(handle.num_bytes, dtype=torch.uint8, device=_home(device, handle.num_bytes + bucket_bytes))
        for part in buffer.split(bucket_bytes):
            if buffer.device == device:
                self.group.broadcast(part)
            else:
                part.copy_(self._take(part.numel()))
        return handle.replace(checksum=_text(self._take(_CHECKSUM_BYTES))), buffer

    def _take(self, num_bytes: int) -> Tensor:
        taken = torch.empty(num_bytes, dtype=torch.uint8, device=self.group.device)
        self.group.broadcast(taken)
        return taken


def _fill(bucket: Tensor, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Yield the flat buffer in order: the bucket, again and again, and at the end what is left in it."""
    filled = 0
    for part in _parts(specs, tensors, bucket.device):
        while part.numel():
            fits = min(part.numel(), bucket.numel() - filled)
            bucket[filled : filled + fits].copy_(part[:fits])
            filled, part = filled + fits, part[fits:]
            if filled == bucket.numel():
                yield bucket
                filled = 0
    if filled:
        yield bucket[:filled]


def _parts(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[Tensor]:
    """The bytes of each tensor, and the zeros between them."""
    end = 0
    for slot, tensor in pair_with_slots(specs, tensors):
        yield torch.zeros(slot.offset - end, dtype=torch.uint8, device=device)
        yield tensor.contiguous().view(-1).view(torch.uint8)
        end = slot.offset + slot.num_bytes
    yield torch.zeros(flat_bytes(specs) - end, dtype=torch.uint8, device=device)


def _home(device: torch.device, num_bytes: int) -> torch.device:
    """Where a receiver puts the buffer: its GPU if there is room beside the engine, else the host's memory."""
    if device.type == "cpu" or torch.cuda.mem_get_info(device)[0] >= num_bytes + _SPARE_BYTES:
        return device
    logger.info("the GPU has no room for %d more bytes: the weights are received in the host's memory", num_bytes)
    return torch.device("cpu")


def _text(characters: Tensor) -> str:
    return bytes(characters.tolist()).decode()


def _nccl(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """A group over NCCL. A lost member must not end this process, as NCCL's watchdog would do by default."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # clean up only; read when the group is made
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
