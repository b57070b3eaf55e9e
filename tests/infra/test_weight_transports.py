"""Both transports of published weights, between real processes."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import node_stats

from infra.ray import object_store
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender
from infra.weights.checksum import checksum
from infra.weights.group import WeightGroup, open_rendezvous
from infra.weights.layout import flat_bytes, make_handle, tensor_specs
from infra.weights.object_store import ObjectStoreReceiver, ObjectStoreSender
from schemas.errors import WeightsError, WorkerLostError
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, WeightsTransfer
from tests.infra import weight_tensors
from tests.infra.weight_tensors import RUN, flat, same, tensors
from tests.progress import wait_until

pytestmark = pytest.mark.slow

for module in (sys.modules[__name__], weight_tensors):
    ray.cloudpickle.register_pickle_by_value(module)  # workers can't import test modules

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 600  # only a member that hangs is waited for this long
LARGE = 3_000_000  # words: 12 MB, which go through the object store and not within Ray's replies


class CopyingEngine:
    """An engine that only copies the weights that it is given, as every engine does."""

    version = 0

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.version = version


class Policy:
    """Rank 0 of a policy."""

    def send(self, version: int, owner: bytes, words: int = LARGE) -> tuple[bytes, SentWeights]:
        state = tensors(version, words)
        return ObjectStoreSender(RUN).send(version, tensor_specs(state), state.items(), owner)

    def send_damaged(self, version: int, owner: bytes) -> tuple[bytes, SentWeights]:
        data, sent = self.send(version, owner, words=9)
        return data[:-60] + bytes(60), sent

    def send_fewer(self, version: int, owner: bytes) -> tuple[bytes, SentWeights]:
        state = tensors(version, LARGE)
        return ObjectStoreSender(RUN).send(version, tensor_specs(state), list(state.items())[:3], owner)

    def wait_for(self, file: Path) -> None:
        while not file.exists():
            time.sleep(0.05)

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        self._rendezvous, handle = open_rendezvous(HOST, num_receivers)
        return handle

    def join(self, group: ProcessGroupHandle, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, 0, HOST, torch.device("cpu"), timeout_seconds)

    def broadcast(
        self, version: int, bucket_bytes: int, words: int = 9, num_tensors: int = 7
    ) -> tuple[bytes, SentWeights]:
        state = tensors(version, words)
        self._gathered: list[str] = []
        given = ((name, self._gather(name, tensor)) for name, tensor in list(state.items())[:num_tensors])
        return BroadcastSender(RUN, self._group, bucket_bytes).send(version, tensor_specs(state), given, b"")

    def gathered(self) -> list[str]:
        return self._gathered

    def _gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._gathered.append(name)
        return tensor


class Rollout:
    """A rollout worker."""

    def __init__(self) -> None:
        self._engine = CopyingEngine()

    def load(
        self, version: int, refs: list[Any], run_id: str = RUN, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> LoadedWeights:
        return ObjectStoreReceiver(run_id, timeout_seconds).load(self._engine, version, refs)

    def join(self, group: ProcessGroupHandle, rank: int, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, rank, HOST, torch.device("cpu"), timeout_seconds)

    def receive(self, version: int) -> LoadedWeights:
        return BroadcastReceiver(RUN, self._group).load(self._engine, version, ())

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def holds(self, version: int, words: int = LARGE) -> bool:
        return self._engine.version == version and same(self._engine.state, tensors(version, words))


@pytest.fixture(scope="module")
def policy(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(num_cpus=0)(Policy).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def rollouts(ray_cluster: None) -> Iterator[list[Any]]:
    actors = [ray.remote(num_cpus=0)(Rollout).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def call_with_refs(policy: Any, method: str, *args: Any) -> list[Any]:
    """Call a sending method, and return the two object refs of its return values."""
    return list(getattr(policy, method).options(num_returns=2).remote(*args))


def store_stats() -> Any:
    node = ray.nodes()[0]
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats


def num_primary_copies() -> int:
    return store_stats().num_object_store_primary_copies


@pytest.mark.parametrize("words", [9, LARGE])
def test_two_receivers_load_what_was_sent(policy: Any, rollouts: list[Any], words: int) -> None:
    refs = call_with_refs(policy, "send", 3, object_store.address(), words)
    loaded = ray.get([rollout.load.remote(3, refs) for rollout in rollouts])
    assert ray.get([rollout.holds.remote(3, words) for rollout in rollouts]) == [True, True]
    sent = ray.get(refs[1])
    assert sent.handle.num_bytes == flat_bytes(tensor_specs(tensors(3, words))) == loaded[0].num_bytes
    assert WeightsTransfer.of("object_store", sent, loaded).num_receivers == 2


def test_twenty_versions_leave_nothing_in_the_object_store(policy: Any, rollouts: list[Any]) -> None:
    before = store_stats()
    for version in range(1, 21):
        refs = call_with_refs(policy, "send", version, object_store.address())
        ray.get([rollout.load.remote(version, refs) for rollout in rollouts])
        assert ray.get(rollouts[0].holds.remote(version))
        # The last version's buffer, and no earlier one; Ray frees in the background, in batches.
        wait_until(lambda: num_primary_copies() <= before.num_object_store_primary_copies + 1)
        del refs
    wait_until(lambda: store_stats().object_store_bytes_used <= before.object_store_bytes_used)


def test_other_versions_other_runs_and_damaged_buffers_are_rejected(
    policy: Any, rollouts: list[Any], tmp_path: Path
) -> None:
    good = call_with_refs(policy, "send", 5, object_store.address())
    ray.get(rollouts[0].load.remote(5, good))
    with pytest.raises(WeightsError, match="version 5 of run weights, expected version 6"):
        ray.get(rollouts[0].load.remote(6, good))
    with pytest.raises(WeightsError, match="expected version 5 of run other"):
        ray.get(rollouts[0].load.remote(5, good, "other"))
    with pytest.raises(WeightsError, match="version 7 of run weights arrived damaged"):
        ray.get(rollouts[0].load.remote(7, call_with_refs(policy, "send_damaged", 7, object_store.address())))
    with pytest.raises(WorkerLostError, match="did not send the weights of version 5 within 1 s"):
        ray.get(rollouts[0].load.remote(5, [good[0], policy.wait_for.remote(tmp_path / "released")], RUN, 1))
    (tmp_path / "released").touch()
    assert ray.get(rollouts[0].holds.remote(5))


def test_a_failed_send_raises_in_the_receivers_and_leaves_no_memory_allocated(policy: Any, rollouts: list[Any]) -> None:
    before, fallback = store_stats().object_store_bytes_primary_copy, store_stats().object_store_bytes_fallback
    for version in range(1, 25):  # together more than the object store holds
        refs = call_with_refs(policy, "send_fewer", version, object_store.address())
        with pytest.raises(WeightsError, match="'scale' is missing"):
            ray.get(rollouts[0].load.remote(version, refs))
        wait_until(lambda: store_stats().object_store_bytes_primary_copy <= before)
    assert store_stats().object_store_bytes_fallback == fallback
    good = call_with_refs(policy, "send", 30, object_store.address())
    ray.get(rollouts[0].load.remote(30, good))
    assert ray.get(rollouts[0].holds.remote(30))


def form_group(policy: Any, rollouts: list[Any]) -> None:
    """Have the members form a new group."""
    group = ray.get(policy.open_rendezvous.remote(len(rollouts)))
    joins = [rollout.join.remote(group, rank, TIMEOUT_SECONDS) for rank, rollout in enumerate(rollouts, start=1)]
    ray.get([policy.join.remote(group, TIMEOUT_SECONDS), *joins])


def test_a_broadcast_in_buckets_of_any_size_arrives_whole(policy: Any, rollouts: list[Any]) -> None:
    form_group(policy, rollouts)
    for version, (bucket_bytes, words) in enumerate([(64, 9), (192, 9), (2**20, 9), (2**20, LARGE)], start=40):
        sent = call_with_refs(policy, "broadcast", version, bucket_bytes, words)
        loaded = ray.get([rollout.receive.remote(version) for rollout in rollouts])
        assert ray.get([rollout.holds.remote(version, words) for rollout in rollouts]) == [True, True]
        state = tensors(version, words)
        expected = make_handle(RUN, version, tensor_specs(state), checksum(flat(state)))
        assert ray.get(sent[1]).handle == expected
        assert WeightsTransfer.of("broadcast", ray.get(sent[1]), loaded).num_bytes == expected.num_bytes
    # A version other than the expected one is rejected, and the group stays usable.
    call_with_refs(policy, "broadcast", 50, 64)
    loads = [rollouts[0].receive.remote(51), rollouts[1].receive.remote(50)]
    with pytest.raises(WeightsError, match="version 50 of run weights, expected version 51"):
        ray.get(loads[0])
    assert ray.get(loads[1]).version == 50
    call_with_refs(policy, "broadcast", 51, 64)
    ray.get([rollout.receive.remote(51) for rollout in rollouts])
    assert ray.get(rollouts[0].holds.remote(51, 9))


def test_a_sender_that_fails_leaves_no_receiver_waiting(policy: Any, rollouts: list[Any]) -> None:
    form_group(policy, rollouts)
    sent = call_with_refs(policy, "broadcast", 60, 64, 9, 3)
    for load in [rollout.receive.remote(60) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            ray.get(load)
    with pytest.raises(WeightsError, match="'scale' is missing"):
        ray.get(sent[1])
    with pytest.raises(WorkerLostError, match="has left the weight group; form a new one"):
        ray.get(call_with_refs(policy, "broadcast", 60, 64)[1])


def test_a_killed_receiver_ends_the_group_and_another_can_be_formed(policy: Any, rollouts: list[Any]) -> None:
    form_group(policy, rollouts)
    rollouts[1].die.remote()
    sent = call_with_refs(policy, "broadcast", 70, 2**20, LARGE)
    with pytest.raises(WorkerLostError, match="member 1 of the weight group lost the others"):
        ray.get(rollouts[0].receive.remote(70))
    with pytest.raises(WorkerLostError, match="member 0 of the weight group lost the others"):
        ray.get(sent[1])
    assert ray.get(policy.gathered.remote()) == list(tensors())  # so the policy's other ranks weren't left waiting
    form_group(policy, rollouts[:1])
    call_with_refs(policy, "broadcast", 71, 2**20, LARGE)
    ray.get(rollouts[0].receive.remote(71))
    assert ray.get(rollouts[0].holds.remote(71))


def test_members_that_do_not_join_are_lost(policy: Any) -> None:
    group = ray.get(policy.open_rendezvous.remote(1))
    with pytest.raises(WorkerLostError, match="member 0 of 2 could not join the weight group"):
        ray.get(policy.join.remote(group, 0.5))


def test_a_policy_that_dies_is_a_lost_worker(policy: Any, rollouts: list[Any]) -> None:
    ray.kill(policy)
    with pytest.raises(WorkerLostError, match="could not send the weights of version 2"):
        ray.get(rollouts[0].load.remote(2, call_with_refs(policy, "send", 2, object_store.address())))
