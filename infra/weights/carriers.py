"""How buckets travel: through shared memory, or by broadcast.

In shared memory, each is a file that the receivers, all on the sender's node, map. A broadcast is by NCCL from GPU to
GPU, or by gloo from host memory to host memory. Meanwhile the sender fills the next bucket.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infra.models.flat_tensors import buffer_as_tensor
from infra.storage.shared_memory import SharedFolder, choose_root
from infra.weights.stream import CHECKSUM_BYTES, decode, encode
from infra.weights.weight_group import Transfer, WeightGroup
from schemas.errors import WeightsError


class SharedMemorySender:
    """A `BucketSender` through shared memory.

    Args:
        group: The group, of which it is member 0.
        folder: The folder of the files, which nobody else writes to.
    """

    def __init__(self, group: WeightGroup, folder: Path) -> None:
        self._group, self._folder = group, folder
        self._num_allocated = self._num_sent = 0
        self.files = str(folder)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the memory of a new file."""
        path = _path(self.files, self._num_allocated)
        self._num_allocated += 1
        try:
            with path.open("w+b") as file:
                os.posix_fallocate(
                    file.fileno(), 0, num_bytes
                )  # or a write past the space left would kill this process
                return buffer_as_tensor(mmap.mmap(file.fileno(), num_bytes))
        except OSError as error:
            raise WeightsError(
                f"{self._folder} has no space for a bucket of {num_bytes} bytes of weights: {error.strerror}; enlarge "
                "it (for Docker: --shm-size), set runtime.shared_memory to another folder, or lower "
                "weights.bucket_bytes"
            ) from None

    def send(self, bucket: Tensor, digest: str) -> None:
        """Wait until the bucket before is copied, remove it, and announce this one."""
        if self._num_sent:
            self.finish()
        self._group.broadcast(encode(digest, self._group.device))
        self._num_sent += 1

    def finish(self) -> None:
        """Wait until the last bucket that was sent is copied, and remove it."""
        self._group.barrier()
        _path(self.files, self._num_sent - 1).unlink()

    def close(self) -> None:
        """Remove all files; what is mapped stays readable."""
        for number in range(self._num_allocated):
            _path(self.files, number).unlink(missing_ok=True)


class SharedMemoryReceiver:
    """A `BucketReceiver` through shared memory.

    Args:
        group: The group, of which it is member 1 or higher.
    """

    def __init__(self, group: WeightGroup) -> None:
        self._group = group

    def receive(self, sizes: Sequence[int], files: str) -> Iterator[tuple[Tensor, str, Path | None]]:
        """Yield each bucket, mapped, once it is announced; see `BucketReceiver.receive`."""
        for number, size in enumerate(sizes):
            digest = decode(self._group.receive(CHECKSUM_BYTES))
            path = _path(files, number)
            with path.open("rb") as opened:
                bucket = buffer_as_tensor(mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ))
            yield bucket, digest, path
            del bucket
            self._group.barrier()


def open_folder(run_id: str, configured: str | None, num_bytes: int) -> SharedFolder:
    """Make the folder of a run's buckets.

    Args:
        run_id: The run.
        configured: `runtime.shared_memory`.
        num_bytes: The most that the files will take together.
    """
    return SharedFolder(choose_root(configured, num_bytes), f"{run_id}-weights")


def _path(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.bin"


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
