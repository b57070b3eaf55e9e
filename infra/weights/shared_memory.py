"""The shared-memory transport: weights are written once to a file in shared memory, and mapped by every receiver.

A receiver on another node fetches the bytes from the policy's rank 0. The file is removed once all have loaded it.
"""

import itertools
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from infra.engines.base import RolloutEngine
from infra.ray.actors import actor_name, find_actor
from infra.ray.worker_logs import open_reply
from infra.storage.shared_memory import SharedFolder, choose_root
from infra.weights.base import load_verified
from infra.weights.checksum import checksum
from infra.weights.layout import buffer_as_tensor, check_version, flat_bytes, join_gather, make_handle, write_tensors
from schemas.errors import WeightsError, WorkerLostError
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsFile

PIECE_BYTES = 64 * 2**20  # of one request of another node's receiver


class SharedMemorySender:
    """A `WeightsSender` through shared memory.

    Args:
        run_id: The run whose weights it sends.
        shared_memory: `runtime.shared_memory`.
    """

    def __init__(self, run_id: str, shared_memory: str | None) -> None:
        self._run_id, self._shared_memory = run_id, shared_memory
        self._folder: SharedFolder | None = None
        self._numbers = itertools.count()

    def send(self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """Write a version's tensors to a file of its own; see `WeightsSender.send`.

        Several sends of one version may be on their way to different receivers. Files of other versions are removed.
        """
        started, remaining, num_bytes = time.perf_counter(), iter(tensors), flat_bytes(specs)
        path = self._prepare(version, num_bytes)
        try:
            buffer = _create(path, num_bytes)
            write_tensors(buffer, specs, remaining)
        except OSError as error:
            join_gather(remaining)  # the other ranks gather all tensors
            path.unlink(missing_ok=True)
            raise WeightsError(
                f"{path.parent} has no space for the {num_bytes} bytes of version {version}'s weights: "
                f"{error.strerror}; enlarge it (for Docker: --shm-size), or set runtime.shared_memory to another folder"
            ) from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        handle = make_handle(self._run_id, version, specs, checksum(buffer))
        file = WeightsFile(node=ray.get_runtime_context().get_node_id(), path=str(path), actor=actor_name())
        return SentWeights(handle=handle, file=file, seconds=time.perf_counter() - started)

    def read(self, file: WeightsFile, start: int, stop: int) -> bytes:
        """Return a part of what was sent, for another node."""
        try:
            with self._path(file).open("rb") as opened:
                return os.pread(opened.fileno(), stop - start, start)
        except FileNotFoundError:
            raise WeightsError("these weights are not being sent any more; publish them again") from None

    def drop(self, file: WeightsFile) -> None:
        """Remove what was sent; receivers that map it keep it."""
        self._path(file).unlink(missing_ok=True)

    def _prepare(self, version: int, num_bytes: int) -> Path:
        """Return a new path for a version's weights, and remove those of other versions."""
        if self._folder is None:
            self._folder = SharedFolder(choose_root(self._shared_memory, num_bytes), f"{self._run_id}-weights")
        for path in self._folder.path.glob("*.bin"):  # whose driver died before it dropped them
            if not path.name.startswith(f"{version}-"):
                path.unlink()
        return self._folder.path / f"{version}-{next(self._numbers)}.bin"

    def _path(self, file: WeightsFile) -> Path:
        if self._folder is None:
            raise WeightsError("no weights were sent; publish them again")
        return self._folder.path / Path(file.path).name


class SharedMemoryReceiver:
    """A `WeightsReceiver` through shared memory.

    Args:
        run_id: The run whose weights it accepts.
        timeout_seconds: The longest wait for a part of the weights from another node.
    """

    def __init__(self, run_id: str, timeout_seconds: float) -> None:
        self._run_id, self._timeout = run_id, timeout_seconds

    def load(self, engine: RolloutEngine, version: int, sent: SentWeights | None) -> LoadedWeights:
        """Read and load a version; see `WeightsReceiver.load`."""
        assert sent is not None
        assert sent.file is not None
        started = time.perf_counter()
        check_version(sent.handle, self._run_id, version)
        if sent.file.node == ray.get_runtime_context().get_node_id():
            buffer = _map(sent.file, version)
        else:
            buffer = self._fetch(sent.file, sent.handle.num_bytes, version)
        return load_verified(engine, sent.handle, buffer, started)

    def _fetch(self, file: WeightsFile, num_bytes: int, version: int) -> Tensor:
        """Fetch the weights from the policy's rank 0 on another node: uint8 [num_bytes]."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if (policy := find_actor(file.actor)) is None:
            raise WorkerLostError(f"the policy is gone, with the weights of version {version}")
        try:
            for start in range(0, num_bytes, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, num_bytes)
                piece = open_reply(ray.get(policy.read_weights.remote(file, start, stop), timeout=self._timeout))
                buffer[start:stop] = buffer_as_tensor(piece)
        except GetTimeoutError:
            raise WorkerLostError(
                f"the policy did not send the weights of version {version} within {self._timeout:g} s"
            ) from None
        except RayError as error:
            raise WorkerLostError(f"the policy could not send the weights of version {version}: {error}") from None
        return buffer


def _create(path: Path, num_bytes: int) -> Tensor:
    """Create a file of this size, with memory for all of it, and map it: uint8 [num_bytes], writable.

    Raises:
        OSError: There is no space for it.
    """
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # or a write past the space left would kill this process
        return buffer_as_tensor(mmap.mmap(file.fileno(), num_bytes))


def _map(file: WeightsFile, version: int) -> Tensor:
    """Map a file of this node: uint8 [n], read-only."""
    try:
        with Path(file.path).open("rb") as opened:
            return buffer_as_tensor(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
    except FileNotFoundError:
        raise WeightsError(f"the weights of version {version} are gone; publish them again") from None
