"""Both transports of published weights, between real processes."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from infra.ray.actors import NAMESPACE
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender
from infra.weights.checksum import checksum
from infra.weights.group import WeightGroup, open_rendezvous
from infra.weights.layout import flat_bytes, make_handle, tensor_specs
from infra.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from schemas.errors import WeightsError, WorkerLostError
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, WeightsFile, WeightsTransfer
from tests.infra import weight_tensors
from tests.infra.weight_tensors import RUN, flat, same, tensors

pytestmark = pytest.mark.slow

for module in (sys.modules[__name__], weight_tensors):
    ray.cloudpickle.register_pickle_by_value(module)  # workers can't import test modules

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 600  # only a member that hangs is waited for this long
LARGE = 3_000_000  # words: 12 MB


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

    def __init__(self, shared_memory: str | None = None) -> None:
        self._files = SharedMemorySender(RUN, shared_memory)

    def send(self, version: int, words: int = LARGE, node: str | None = None) -> SentWeights:
        state = tensors(version, words)
        sent = self._files.send(version, tensor_specs(state), state.items())
        assert sent.file is not None
        return sent.replace(file=sent.file.replace(node=node or sent.file.node))

    def read_weights(self, file: WeightsFile, start: int, stop: int) -> bytes:
        return self._files.read(file, start, stop)

    def drop(self, file: WeightsFile) -> None:
        self._files.drop(file)

    def send_damaged(self, version: int) -> SentWeights:
        sent = self.send(version, words=9)
        assert sent.file is not None
        path = Path(sent.file.path)
        path.write_bytes(path.read_bytes()[:-60] + bytes(60))
        return sent

    def send_fewer(self, version: int) -> SentWeights:
        state = tensors(version, LARGE)
        return self._files.send(version, tensor_specs(state), list(state.items())[:3])

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        self._rendezvous, handle = open_rendezvous(HOST, num_receivers)
        return handle

    def join(self, group: ProcessGroupHandle, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, 0, HOST, torch.device("cpu"), timeout_seconds)

    def broadcast(self, version: int, bucket_bytes: int, words: int = 9, num_tensors: int = 7) -> SentWeights:
        state = tensors(version, words)
        self._gathered: list[str] = []
        given = ((name, self._gather(name, tensor)) for name, tensor in list(state.items())[:num_tensors])
        return BroadcastSender(RUN, self._group, bucket_bytes).send(version, tensor_specs(state), given)

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
        self, version: int, sent: SentWeights, run_id: str = RUN, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> LoadedWeights:
        return SharedMemoryReceiver(run_id, timeout_seconds).load(self._engine, version, sent)

    def join(self, group: ProcessGroupHandle, rank: int, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, rank, HOST, torch.device("cpu"), timeout_seconds)

    def receive(self, version: int) -> LoadedWeights:
        return BroadcastReceiver(RUN, self._group).load(self._engine, version, None)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def holds(self, version: int, words: int = LARGE) -> bool:
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


def shared_bytes(policy: Any) -> int:
    """Return the bytes of the files that the policy's sender holds."""
    sent = ray.get(policy.send.remote(1, 9))
    return sum(path.stat().st_size for path in Path(sent.file.path).parent.iterdir())


@pytest.mark.parametrize("words", [9, LARGE])
@pytest.mark.parametrize("node", [None, "another node"])
def test_two_receivers_load_what_was_sent(policy: Any, rollouts: list[Any], words: int, node: str | None) -> None:
    sent = ray.get(policy.send.remote(3, words, node))
    loaded = ray.get([rollout.load.remote(3, sent) for rollout in rollouts])
    assert ray.get([rollout.holds.remote(3, words) for rollout in rollouts]) == [True, True]
    assert sent.handle.num_bytes == flat_bytes(tensor_specs(tensors(3, words))) == loaded[0].num_bytes
    assert WeightsTransfer.of("shared_memory", sent, loaded).num_receivers == 2


def test_two_sends_of_one_version_do_not_disturb_each_other(policy: Any, rollouts: list[Any]) -> None:
    first, second = ray.get(policy.send.remote(4)), ray.get(policy.send.remote(4))
    ray.get(rollouts[1].load.remote(4, second))
    ray.get(policy.drop.remote(second.file))
    ray.get(rollouts[0].load.remote(4, first))
    assert ray.get([rollout.holds.remote(4) for rollout in rollouts]) == [True, True]


def test_twenty_versions_leave_nothing_in_shared_memory(policy: Any, rollouts: list[Any]) -> None:
    before = shared_bytes(policy)
    for version in range(1, 21):
        sent = ray.get(policy.send.remote(version))
        ray.get([rollout.load.remote(version, sent) for rollout in rollouts])
        assert ray.get(rollouts[0].holds.remote(version))
    ray.get(policy.drop.remote(sent.file))
    assert not Path(sent.file.path).exists()
    assert shared_bytes(policy) == before


def test_other_versions_other_runs_and_damaged_buffers_are_rejected(policy: Any, rollouts: list[Any]) -> None:
    good = ray.get(policy.send.remote(5))
    ray.get(rollouts[0].load.remote(5, good))
    with pytest.raises(WeightsError, match="version 5 of run weights, expected version 6"):
        ray.get(rollouts[0].load.remote(6, good))
    with pytest.raises(WeightsError, match="expected version 5 of run other"):
        ray.get(rollouts[0].load.remote(5, good, "other"))
    with pytest.raises(WeightsError, match="version 7 of run weights arrived damaged"):
        ray.get(rollouts[0].load.remote(7, ray.get(policy.send_damaged.remote(7))))
    with pytest.raises(WeightsError, match="the weights of version 5 are gone"):
        ray.get(rollouts[0].load.remote(5, good))
    assert ray.get(rollouts[0].holds.remote(5))


def test_a_failed_send_leaves_nothing_and_the_next_succeeds(policy: Any, rollouts: list[Any]) -> None:
    before = shared_bytes(policy)
    for version in range(1, 5):
        with pytest.raises(WeightsError, match="'scale' is missing"):
            ray.get(policy.send_fewer.remote(version))
    assert shared_bytes(policy) == before
    ray.get(rollouts[0].load.remote(30, ray.get(policy.send.remote(30))))
    assert ray.get(rollouts[0].holds.remote(30))


def test_full_shared_memory_names_the_setting(ray_cluster: None, small_memory: Path) -> None:
    actor: Any = ray.remote(num_cpus=0)(Policy).remote(str(small_memory))
    with pytest.raises(WeightsError, match=r"no space for the \d+ bytes of version 1's weights.*runtime.shared_memory"):
        ray.get(actor.send.remote(1))
    assert ray.get(actor.send.remote(2, 9)).handle.version == 2
    ray.kill(actor)


def form_group(policy: Any, rollouts: list[Any]) -> None:
    """Have the members form a new group."""
    group = ray.get(policy.open_rendezvous.remote(len(rollouts)))
    joins = [rollout.join.remote(group, rank, TIMEOUT_SECONDS) for rank, rollout in enumerate(rollouts, start=1)]
    ray.get([policy.join.remote(group, TIMEOUT_SECONDS), *joins])


def test_a_broadcast_in_buckets_of_any_size_arrives_whole(policy: Any, rollouts: list[Any]) -> None:
    form_group(policy, rollouts)
    for version, (bucket_bytes, words) in enumerate([(64, 9), (192, 9), (2**20, 9), (2**20, LARGE)], start=40):
        sent = policy.broadcast.remote(version, bucket_bytes, words)
        loaded = ray.get([rollout.receive.remote(version) for rollout in rollouts])
        assert ray.get([rollout.holds.remote(version, words) for rollout in rollouts]) == [True, True]
        state = tensors(version, words)
        expected = make_handle(RUN, version, tensor_specs(state), checksum(flat(state)))
        assert ray.get(sent).handle == expected
        assert WeightsTransfer.of("broadcast", ray.get(sent), loaded).num_bytes == expected.num_bytes
    # A version other than the expected one is rejected, and the group stays usable.
    policy.broadcast.remote(50, 64)
    loads = [rollouts[0].receive.remote(51), rollouts[1].receive.remote(50)]
    with pytest.raises(WeightsError, match="version 50 of run weights, expected version 51"):
        ray.get(loads[0])
    assert ray.get(loads[1]).version == 50
    policy.broadcast.remote(51, 64)
    ray.get([rollout.receive.remote(51) for rollout in rollouts])
    assert ray.get(rollouts[0].holds.remote(51, 9))


def test_a_sender_that_fails_leaves_no_receiver_waiting(policy: Any, rollouts: list[Any]) -> None:
    form_group(policy, rollouts)
    sent = policy.broadcast.remote(60, 64, 9, 3)
    for load in [rollout.receive.remote(60) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            ray.get(load)
    with pytest.raises(WeightsError, match="'scale' is missing"):
        ray.get(sent)
    with pytest.raises(WorkerLostError, match="has left the weight group; form a new one"):
        ray.get(policy.broadcast.remote(60, 64))


def test_a_killed_receiver_ends_the_group_and_another_can_be_formed(policy: Any, rollouts: list[Any]) -> None:
    form_group(policy, rollouts)
    rollouts[1].die.remote()
    sent = policy.broadcast.remote(70, 2**20, LARGE)
    with pytest.raises(WorkerLostError, match="member 1 of the weight group lost the others"):
        ray.get(rollouts[0].receive.remote(70))
    with pytest.raises(WorkerLostError, match="member 0 of the weight group lost the others"):
        ray.get(sent)
    assert ray.get(policy.gathered.remote()) == list(tensors())  # so the policy's other ranks weren't left waiting
    form_group(policy, rollouts[:1])
    policy.broadcast.remote(71, 2**20, LARGE)
    ray.get(rollouts[0].receive.remote(71))
    assert ray.get(rollouts[0].holds.remote(71))


def test_members_that_do_not_join_are_lost(policy: Any) -> None:
    group = ray.get(policy.open_rendezvous.remote(1))
    with pytest.raises(WorkerLostError, match="member 0 of 2 could not join the weight group"):
        ray.get(policy.join.remote(group, 0.5))


def test_a_policy_that_dies_is_a_lost_worker(policy: Any, rollouts: list[Any]) -> None:
    sent = ray.get(policy.send.remote(2, LARGE, "another node"))
    ray.kill(policy)
    with pytest.raises(WorkerLostError, match="the weights of version 2"):
        ray.get(rollouts[0].load.remote(2, sent))
