"""The stream of a policy version's weights, from the policy's rank 0 to rollout workers, in a `WeightGroup`.

It consists of: one int64, the bytes of the handle; the handle as JSON; and the buckets, each with its checksum. A
carrier moves the buckets: see `infra.weights.carriers`. While the engines copy a
bucket, the next one is gathered, filled and moved; the one after that begins once all have copied the first.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from infra.engines.base import RolloutEngine, WeightsBucket
from infra.engines.program import frames
from infra.models.flat_tensors import buffer_as_tensor, flat_bytes, tensor_views, write_tensors
from infra.weights.buckets import join_gather, sent_bytes, split_buckets
from infra.weights.weight_group import WeightGroup
from schemas.errors import WeightsError
from schemas.weights import LoadedWeights, SentWeights, WeightsHandle

CHECKSUM_BYTES = 64
_CUDA_ROWS = 8192  # of 8 KiB, 64 MiB at a time: few launches


def checksum(buffer: Tensor) -> str:
    """Return the checksum of a whole bucket, uint8 [n], n a multiple of 8, contiguous, on any device."""
    words = buffer.view(torch.int64)
    if words.is_cuda:
        return frames.checksum(words, _CUDA_ROWS)
    return frames.checksum(words.numpy())  # not torch: its threads cost more than such small sums


class BucketSender(Protocol):
    """The sending side of a carrier; it holds two buckets at most."""

    files: str  # the folder of the buckets' files; empty: none

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the memory of the next bucket: uint8 [num_bytes], of any content.

        Raises:
            WeightsError: No space is left for it.
        """
        ...

    def send(self, bucket: Tensor, digest: str) -> None:
        """Send the filled bucket, once the one before it has been received.

        Raises:
            WorkerLostError: A receiver is gone, or did not take part in time.
        """
        ...

    def finish(self) -> None:
        """Wait until the last bucket has been received.

        Raises:
            WorkerLostError: A receiver is gone, or did not take part in time.
        """
        ...

    def close(self) -> None:
        """Free what is left, also after an error."""
        ...


class BucketReceiver(Protocol):
    """The receiving side of a carrier."""

    def receive(self, sizes: Sequence[int], files: str) -> Iterator[tuple[Tensor, str, Path | None]]:
        """Yield each bucket (uint8 [size], on any device), its checksum, and its file if it is one.

        Taking the next bucket says that the one before has been copied.

        Raises:
            WorkerLostError: The sender is gone, or did not take part in time.
        """
        ...


def send_weights(
    group: WeightGroup, carrier: BucketSender, handle: WeightsHandle, tensors: Iterable[tuple[str, Tensor]]
) -> SentWeights:
    """Send a version's tensors to all other members of the group; for its rank 0.

    Args:
        group: The group.
        carrier: What moves the buckets.
        handle: The handle, with the specs of `tensors`.
        tensors: The whole tensors by name, in order, on any device. Each is taken once the previous one is written, so
            that sharded tensors can be gathered one at a time; all are taken even if a receiver is lost.

    Raises:
        WeightsError: No space is left for a bucket, or the tensors don't match the handle.
        WorkerLostError: A receiver is gone, or did not take part in time.
    """
    started, remaining = time.perf_counter(), iter(tensors)
    try:
        with group.leave_on_error():
            head = buffer_as_tensor(handle.replace(files=carrier.files).model_dump_json().encode())
            group.broadcast(torch.tensor([head.numel()], device=group.device))
            group.broadcast(head.to(group.device))
            for specs in split_buckets(handle.tensors, handle.bucket_bytes):
                bucket = carrier.allocate(flat_bytes(specs))
                write_tensors(bucket, specs, islice(remaining, len(specs)))
                carrier.send(bucket, checksum(bucket))
                del bucket
            carrier.finish()
    finally:
        carrier.close()
        join_gather(remaining)  # the policy's other ranks gather all tensors, whatever fails here
    num_bytes = sent_bytes(handle.tensors, handle.bucket_bytes)
    return SentWeights(version=handle.version, num_bytes=num_bytes, seconds=time.perf_counter() - started)


def load_weights(
    group: WeightGroup, carrier: BucketReceiver, engine: RolloutEngine, run_id: str, version: int
) -> tuple[WeightsHandle, LoadedWeights]:
    """Receive a version and load it into the engine, bucket by bucket; for all members of the group but rank 0.

    A bucket is verified before the engine gets it, unless the engine does that itself. The engine has no version from
    the first bucket until the last one is verified and copied. If the weights are rejected, the group stays usable.

    Raises:
        WeightsError: The weights are of another version or model, and the engine is unchanged; or a bucket is damaged.
        WorkerLostError: The sender is gone, or did not take part in time.
    """
    started = time.perf_counter()
    with group.leave_on_error(besides=WeightsError):
        size = group.receive(torch.int64.itemsize).view(torch.int64).item()
        handle = WeightsHandle.model_validate_json(decode(group.receive(int(size))))
        stream = _Stream(carrier, handle, verify=not engine.verifies_buckets)
        try:
            _check_version(handle, run_id, version)
            engine.load_weights(handle.tensors, stream, version, is_complete=handle.is_complete)
        finally:
            stream.skip_rest()  # nothing is left of it, unless these weights were rejected
    return handle, LoadedWeights(
        version=version,
        num_bytes=sent_bytes(handle.tensors, handle.bucket_bytes),
        read_seconds=stream.seconds,
        load_seconds=max(0.0, time.perf_counter() - started - stream.seconds),
    )


class _Stream:
    """The buckets of a version, verified if asked to.

    Attributes:
        seconds: Spent on waiting for buckets and verifying them.
    """

    def __init__(self, carrier: BucketReceiver, handle: WeightsHandle, *, verify: bool) -> None:
        self._handle, self._verifies = handle, verify
        self._specs = split_buckets(handle.tensors, handle.bucket_bytes)
        self._received = carrier.receive([flat_bytes(specs) for specs in self._specs], handle.files)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[WeightsBucket]:
        for number, specs in enumerate(self._specs):
            since = time.perf_counter()
            bucket, digest, file = next(self._received)
            if self._verifies:
                self._verify(bucket, digest, number)
            given = WeightsBucket(tensor_views(bucket, specs), digest, file)
            del bucket
            self.seconds += time.perf_counter() - since
            yield given
            given.tensors.clear()  # frees the bucket, although the engine's loop still names this one
        self.skip_rest()

    def skip_rest(self) -> None:
        """Take part in receiving the buckets that are left, and discard them."""
        for _ in self._received:
            pass

    def _verify(self, bucket: Tensor, digest: str, number: int) -> None:
        if (found := checksum(bucket)) != digest:
            raise WeightsError(
                f"bucket {number} of {len(self._specs)} of the weights of version {self._handle.version} of run "
                f"{self._handle.run_id} arrived damaged: checksum {found}, expected {digest}; the engine has no "
                "version now: publish them again"
            )


def decode(characters: Tensor) -> str:
    """Return a message, uint8 [n], as text."""
    return bytes(characters.tolist()).decode()


def encode(text: str, device: torch.device) -> Tensor:
    """Return a text as a message, uint8 [n], on a device."""
    return buffer_as_tensor(text.encode()).to(device)


def _check_version(handle: WeightsHandle, run_id: str, version: int) -> None:
    if (handle.run_id, handle.version) != (run_id, version):
        raise WeightsError(
            f"received the weights of version {handle.version} of run {handle.run_id}, expected version {version} of "
            f"run {run_id}; nothing was loaded: publish that version"
        )
