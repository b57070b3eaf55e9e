"""Buckets by broadcast: NCCL from GPU to GPU, gloo from host memory to host memory.

While a bucket is on its way, the sender fills the next one, and a receiver's engine copies the one before.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infra.weights.group import Transfer, WeightGroup
from infra.weights.stream import CHECKSUM_BYTES, decode, encode


class BroadcastSender:
    """A `BucketSender` by broadcast.

    Args:
        group: The group, of which it is member 0.
    """

    files = ""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self._pending: list[Transfer] = []

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory on the group's device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)

    def send(self, bucket: Tensor, digest: str) -> None:
        """Wait for the bucket before, and begin to send this one."""
        self.finish()
        self._pending = [self._group.start(bucket), self._group.start(encode(digest, self._group.device))]

    def finish(self) -> None:
        """Wait until the bucket that is on its way has been received."""
        while self._pending:
            self._pending.pop(0).wait()

    def close(self) -> None:
        """Free the bucket that is on its way."""
        self._pending = []


class BroadcastReceiver:
    """A `BucketReceiver` by broadcast.

    Args:
        group: The group, of which it is member 1 or higher.
    """

    def __init__(self, group: WeightGroup) -> None:
        self._group = group

    def receive(self, sizes: Sequence[int], files: str) -> Iterator[tuple[Tensor, str, Path | None]]:
        """Yield each bucket while the next one is received; see `BucketReceiver.receive`."""
        coming = self._start(sizes[0])
        for number in range(len(sizes)):
            bucket, digest = (transfer.wait() for transfer in coming)
            coming = self._start(sizes[number + 1]) if number + 1 < len(sizes) else ()
            yield bucket, decode(digest), None
            del bucket

    def _start(self, num_bytes: int) -> tuple[Transfer, ...]:
        sizes, device = (num_bytes, CHECKSUM_BYTES), self._group.device
        return tuple(self._group.start(torch.empty(size, dtype=torch.uint8, device=device)) for size in sizes)
