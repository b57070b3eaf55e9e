"""Both transports of published weights, between real processes."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from infra.engines.base import WeightsBucket
from infra.models.flat_tensors import tensor_specs
from infra.ray.actors import NAMESPACE
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender
from infra.weights.buckets import sent_bytes
from infra.weights.group import WeightGroup, open_rendezvous
from infra.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, open_folder
from infra.weights.stream import load_weights, send_weights
from schemas.errors import WeightsError, WorkerLostError
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, Transport, WeightsHandle, WeightsTransfer
from tests.support import weight_tensors
from tests.support.weight_tensors import RUN, same, tensors

for module in (sys.modules[__name__], weight_tensors):
    ray.cloudpickle.register_pickle_by_value(module)  # workers can't import test modules

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 600  # only a member that hangs is waited for this long
LARGE = 3_000_000  # words: 12 MB
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])


class CopyingEngine:
    """An engine that only copies the weights that it is given, as every engine does."""

    dtype = "float32"

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
        self._rendezvous, handle = open_rendezvous(HOST, num_receivers)
        return handle

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


@pytest.fixture(scope="module")
def policy(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(num_cpus=0)(Policy).options(name="policy", namespace=NAMESPACE).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def rollouts(ray_cluster: None) -> Iterator[list[Any]]:
    actors = [ray.remote(num_cpus=0)(Rollout).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def form_group(policy: Any, rollouts: list[Any]) -> None:
    """Have the members form a new group."""
    group = ray.get(policy.open_rendezvous.remote(len(rollouts)))
    joins = [rollout.join.remote(group, rank, TIMEOUT_SECONDS) for rank, rollout in enumerate(rollouts, start=1)]
    ray.get([policy.join.remote(group, TIMEOUT_SECONDS), *joins])


def assert_published(
    policy: Any, rollouts: list[Any], transport: Transport, version: int, bucket_bytes: int = 64, words: int = 9
) -> None:
    """Send a version with these bytes of a bucket and words of the last tensor, and check that all hold it."""
    sent = policy.send.remote(transport, version, bucket_bytes, words)
    loaded = ray.get([rollout.load.remote(transport, version) for rollout in rollouts])
    expected = sent_bytes(tensor_specs(tensors(version, words)), bucket_bytes)
    assert all(ray.get([rollout.holds.remote(version, words) for rollout in rollouts]))
    assert ray.get(sent).num_bytes == expected == loaded[0].num_bytes
    assert WeightsTransfer.of(transport, ray.get(sent), loaded).num_receivers == len(rollouts)
    assert ray.get(policy.num_files.remote()) == 0


@TRANSPORTS
def test_weights_in_buckets_of_any_size_arrive_whole(policy: Any, rollouts: list[Any], transport: Transport) -> None:
    form_group(policy, rollouts)
    for version, sizes in enumerate([(64, 9), (192, 9), (2**20, 9), (2**20, LARGE), (2**24, LARGE)], start=1):
        assert_published(policy, rollouts, transport, version, *sizes)


@TRANSPORTS
def test_rejected_weights_leave_the_group_usable(policy: Any, rollouts: list[Any], transport: Transport) -> None:
    form_group(policy, rollouts)
    assert_published(policy, rollouts, transport, 4)
    for expected, run_id, text in ((6, RUN, "expected version 6"), (5, "other", "expected version 5 of run other")):
        sent = policy.send.remote(transport, 5)
        loads = [rollouts[0].load.remote(transport, expected, run_id), rollouts[1].load.remote(transport, 5)]
        with pytest.raises(WeightsError, match=f"version 5 of run weights, {text}"):
            ray.get(loads[0])
        assert ray.get(loads[1]).version == ray.get(sent).version == 5
    assert ray.get([rollouts[0].holds.remote(4), rollouts[1].holds.remote(5)]) == [True, True]

    sent = policy.send.remote(transport, 6, 64, 9, 7, True)
    for load in [rollout.load.remote(transport, 6) for rollout in rollouts]:
        with pytest.raises(WeightsError, match=r"bucket 2 of 7 of the weights of version 6 .* damaged.*has no version"):
            ray.get(load)
    assert ray.get(sent).version == 6
    assert ray.get([rollout.version.remote() for rollout in rollouts]) == [None, None]
    assert_published(policy, rollouts, transport, 6)


@TRANSPORTS
def test_a_sender_that_fails_leaves_no_receiver_waiting(policy: Any, rollouts: list[Any], transport: Transport) -> None:
    form_group(policy, rollouts)
    sent = policy.send.remote(transport, 60, 64, 9, 3)
    for load in [rollout.load.remote(transport, 60) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            ray.get(load)
    with pytest.raises(WeightsError, match="'scale' is missing"):
        ray.get(sent)
    with pytest.raises(WorkerLostError, match="has left the weight group; form a new one"):
        ray.get(policy.send.remote(transport, 60))
    assert ray.get([rollout.version.remote() for rollout in rollouts]) == [None, None]
    assert ray.get(policy.num_files.remote()) == 0


@TRANSPORTS
def test_a_receiver_killed_in_a_bucket_ends_the_group(policy: Any, rollouts: list[Any], transport: Transport) -> None:
    victim: Any = ray.remote(num_cpus=0)(Rollout).remote()
    form_group(policy, [rollouts[0], victim])
    sent = policy.send.remote(transport, 70, 64)
    loads = [rollouts[0].load.remote(transport, 70), victim.load.remote(transport, 70, RUN, 1)]
    with pytest.raises(WorkerLostError, match="member 1 of the weight group lost the others"):
        ray.get(loads[0])
    with pytest.raises(WorkerLostError, match="member 0 of the weight group lost the others"):
        ray.get(sent)
    assert ray.get(rollouts[0].version.remote()) is None
    assert ray.get(policy.gathered.remote()) == list(tensors())  # so the policy's other ranks weren't left waiting
    assert ray.get(policy.num_files.remote()) == 0
    form_group(policy, rollouts)
    assert_published(policy, rollouts, transport, 71)


def test_full_shared_memory_names_the_settings(rollouts: list[Any], small_memory: Path) -> None:
    actor: Any = ray.remote(num_cpus=0)(Policy).remote(str(small_memory))
    form_group(actor, rollouts)
    loads = [rollout.load.remote("shared_memory", 1) for rollout in rollouts]
    with pytest.raises(WeightsError, match=r"no space for a bucket of \d+ bytes .*shared_memory.*weight_bucket_bytes"):
        ray.get(actor.send.remote("shared_memory", 1, 2**24, LARGE))
    for load in loads:
        with pytest.raises(WorkerLostError, match="lost the others"):
            ray.get(load)
    form_group(actor, rollouts)
    assert_published(actor, rollouts, "shared_memory", 2)
    ray.kill(actor)


def test_members_that_do_not_join_are_lost(policy: Any) -> None:
    group = ray.get(policy.open_rendezvous.remote(1))
    with pytest.raises(WorkerLostError, match="member 0 of 2 could not join the weight group"):
        ray.get(policy.join.remote(group, 0.5))


@TRANSPORTS
def test_a_policy_killed_between_buckets_leaves_no_version(rollouts: list[Any], transport: Transport) -> None:
    policy: Any = ray.remote(num_cpus=0)(Policy).remote()
    form_group(policy, rollouts)
    assert_published(policy, rollouts, transport, 1)
    policy.send.remote(transport, 2, 64, 9, 7, False, "turned")
    for load in [rollout.load.remote(transport, 2) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            ray.get(load)
    assert ray.get([rollout.version.remote() for rollout in rollouts]) == [None, None]
