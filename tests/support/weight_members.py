"""Members of a weight group, for processes of their own: a policy's rank 0 that sends, and rollout workers."""

import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from infra.engines.base import WeightsBucket
from infra.models.flat_tensors import tensor_specs
from infra.ray.rendezvous import Rendezvous
from infra.weights.buckets import sent_bytes
from infra.weights.carriers import (
    BroadcastReceiver,
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    open_folder,
)
from infra.weights.stream import load_weights, send_weights
from infra.weights.weight_group import WeightGroup
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, Transport, WeightsHandle
from tests.support.weight_tensors import RUN, same, tensors

HOST = "127.0.0.1"


class CopyingEngine:
    """An engine that only copies the weights that it is given, as every engine does."""

    dtype = "float32"
    verifies_buckets = False

    def __init__(self) -> None:
        self.version: int | None = 0
        self.state: dict[str, torch.Tensor] = {}
        self.dies_in_bucket: int | None = None

    def load_weights(
        self, specs: Sequence[TensorSpec], buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        self.version, state = None, {}
        for number, bucket in enumerate(buckets):
            if number == self.dies_in_bucket:
                os.kill(os.getpid(), signal.SIGKILL)
            state |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
        self.state, self.version = state, version


class DamagingSender:
    """A `BucketSender` that damages the third bucket after its checksum is computed."""

    def __init__(self, sender: Any) -> None:
        self._sender, self._number = sender, 0
        self.files, self.allocate = sender.files, sender.allocate
        self.finish, self.close = sender.finish, sender.close

    def send(self, bucket: torch.Tensor, digest: str) -> None:
        if self._number == 2:
            bucket[5] ^= 1
        self._number += 1
        self._sender.send(bucket, digest)


class Policy:
    """Rank 0 of a policy."""

    def __init__(self, shared_memory: str | None = None) -> None:
        self._folder = open_folder(RUN, shared_memory, 1)

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        self._rendezvous = Rendezvous(HOST, 1 + num_receivers)
        return self._rendezvous.group

    def join(self, group: ProcessGroupHandle, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, 0, HOST, torch.device("cpu"), timeout_seconds)

    def send(
        self,
        transport: Transport,
        version: int,
        bucket_bytes: int = 64,
        words: int = 9,
        num_tensors: int = 7,
        damaging: bool = False,
        dies_at: str = "",
    ) -> SentWeights:
        state = tensors(version, words)
        self._gathered: list[str] = []
        self._dies_at = dies_at
        given = ((name, self._gather(name, tensor)) for name, tensor in list(state.items())[:num_tensors])
        sender: Any = BroadcastSender(self._group)
        if transport == "shared_memory":
            sender = SharedMemorySender(self._group, self._folder.path)
        specs = tensor_specs(state)
        handle = WeightsHandle(run_id=RUN, version=version, tensors=specs, bucket_bytes=bucket_bytes)
        return send_weights(self._group, DamagingSender(sender) if damaging else sender, handle, given)

    def expected_bytes(self, version: int, bucket_bytes: int, words: int) -> int:
        return sent_bytes(tensor_specs(tensors(version, words)), bucket_bytes)

    def names(self) -> list[str]:
        """Return the names of all tensors of a version."""
        return list(tensors())

    def gathered(self) -> list[str]:
        return self._gathered

    def num_files(self) -> int:
        return len(list(self._folder.path.glob("*.bin")))

    def _gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._gathered.append(name)
        return tensor


class Rollout:
    """A rollout worker."""

    def __init__(self) -> None:
        self._engine = CopyingEngine()

    def join(self, group: ProcessGroupHandle, rank: int, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, rank, HOST, torch.device("cpu"), timeout_seconds)

    def load(
        self, transport: Transport, version: int, run_id: str = RUN, dies_in_bucket: int | None = None
    ) -> LoadedWeights:
        self._engine.dies_in_bucket = dies_in_bucket
        receiver = (SharedMemoryReceiver if transport == "shared_memory" else BroadcastReceiver)(self._group)
        _, loaded = load_weights(self._group, receiver, self._engine, run_id, version)
        return loaded

    def version(self) -> int | None:
        return self._engine.version

    def holds(self, version: int, words: int = 9) -> bool:
        return self._engine.version == version and same(self._engine.state, tensors(version, words))
