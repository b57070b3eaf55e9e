"""Published weights: their layout and checksum, and both ways that they travel, between real processes."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private.internal_api import node_stats

from infra.ray import object_store
from infra.weights.broadcast import BroadcastReceiver, BroadcastSender
from infra.weights.checksum import _sums, checksum
from infra.weights.endpoint import gpu_of
from infra.weights.group import WeightGroup, open_rendezvous
from infra.weights.layout import (
    assign_slots,
    buffer_as_tensor,
    flat_bytes,
    make_handle,
    tensor_specs,
    tensor_views,
    verify_buffer,
    write_tensors,
)
from infra.weights.object_store import ObjectStoreReceiver, ObjectStoreSender
from infra.weights.transport import choose_transport
from schemas.errors import ConfigError, WeightsError, WorkerLostError
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle, WeightsTransfer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules

RUN = "weights"
HOST = "127.0.0.1"
LARGE = 3_000_000  # words: twelve megabytes, which go by the object store and not within Ray's replies


def tensors(version: int = 0, words: int = 9) -> dict[str, torch.Tensor]:
    """Of several dtypes and shapes, one of them empty, one a scalar, one not contiguous."""
    generator = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(3, 5, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "none": torch.empty(0, 4),
        "scale": torch.tensor(version, dtype=torch.float64),
        "turned": torch.randn(4, 6, generator=generator).half().t(),
        "mask": torch.tensor([True, False, True]),
        "head": torch.randn(words, generator=generator),
    }


def flat(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A buffer whose memory held something else before."""
    specs = tensor_specs(state)
    buffer = torch.full((flat_bytes(specs),), 255, dtype=torch.uint8)
    write_tensors(buffer, specs, state.items())
    return buffer


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def test_layout_is_aligned_zero_padded_and_read_back_without_a_copy() -> None:
    state = tensors()
    placed = assign_slots(tensor_specs(state))
    # 60, 14, 0, 8, 48, 3 and 36 bytes, each begun at the next multiple of 64
    assert [slot.offset for slot in placed] == [0, 64, 128, 128, 192, 256, 320]
    assert flat_bytes(tensor_specs(state)) == 384
    buffer = flat(state)
    assert same(tensor_views(buffer, tensor_specs(state)), state)
    used = np.zeros(384, dtype=bool)
    for slot in placed:
        used[slot.offset : slot.offset + slot.num_bytes] = True
    assert not buffer.numpy()[~used].any()
    assert tensor_views(buffer, tensor_specs(state))["embed"].data_ptr() == buffer.data_ptr()
    assert buffer[:60].view(torch.float32).tolist() == state["embed"].flatten().tolist()


def test_an_empty_set_of_weights_has_a_buffer() -> None:
    assert flat_bytes(()) == 64
    assert not flat({"none": torch.empty(0)}).any()
    assert tensor_views(flat({}), ()) == {}


def test_what_comes_is_what_was_announced() -> None:
    state = tensors()
    specs = tensor_specs(state)
    buffer = torch.zeros(flat_bytes(specs), dtype=torch.uint8)
    with pytest.raises(WeightsError, match="'head' is missing"):
        write_tensors(buffer, specs, list(state.items())[:-1])
    with pytest.raises(WeightsError, match=r"got name='norm'.*, expected name='embed'"):
        write_tensors(buffer, specs, list(state.items())[1:])
    with pytest.raises(WeightsError, match=r"'more'.*expected no more tensors"):
        write_tensors(buffer, specs, [*state.items(), ("more", torch.zeros(1))])
    with pytest.raises(WeightsError, match=r"dtype='float64'.*expected.*dtype='float32'"):
        write_tensors(buffer, specs, {**state, "embed": state["embed"].double()}.items())
    with pytest.raises(WeightsError, match="'embed' is duplicated"):
        flat_bytes((*specs, specs[0]))
    with pytest.raises(WeightsError, match="'float5', which torch doesn't have"):
        flat_bytes((TensorSpec(name="a", dtype="float5", shape=()),))


def test_checksum_by_hand() -> None:
    words = torch.tensor([3, -1, 2**32 + 5], dtype=torch.int64)
    # upper halves 0, -1, 1
    sums = (3 - 1 + 2**32 + 5, -1 + 2 * (2**32 + 5), 0, -1 + 2)
    assert checksum(words.view(torch.uint8)) == "".join(f"{each:016x}" for each in sums)


def test_checksum_of_a_large_buffer_equals_exact_sums() -> None:
    values = np.random.default_rng(0).integers(-(2**63), 2**63, 200_001)
    exact = [0, 0, 0, 0]
    for at, word in enumerate(values.tolist()):
        for sums, value in ((0, word), (2, word >> 32)):
            exact[sums] += value
            exact[sums + 1] += at * value
    found = checksum(torch.from_numpy(values).view(torch.uint8))
    assert found == "".join(f"{each % 2**64:016x}" for each in exact)


def test_the_sums_of_torch_which_cuda_takes_are_those_of_numpy() -> None:
    values = np.random.default_rng(1).integers(-(2**63), 2**63, (70, 50))
    plain, weighted = _sums(torch.from_numpy(values))
    assert [plain % 2**64, weighted % 2**64] == [each % 2**64 for each in _sums(values)]


@pytest.mark.parametrize("seed", range(20))
def test_checksum_sees_flipped_bits_and_swapped_words(seed: int) -> None:
    random = np.random.default_rng(seed)
    buffer = torch.from_numpy(random.integers(0, 256, 80_000).astype(np.uint8))
    before = checksum(buffer)
    at, bit = int(random.integers(80_000)), int(random.integers(8))
    buffer[at] ^= 1 << bit
    assert checksum(buffer) != before
    buffer[at] ^= 1 << bit
    assert checksum(buffer) == before
    words = buffer.view(torch.int64)
    first, second = random.choice(10_000, 2, replace=False).tolist()
    words[[first, second]] = words[[second, first]]
    assert checksum(buffer) != before


def test_checksum_sees_signs_that_have_changed_places() -> None:
    # 64-bit position-weighted sums alone don't: the distance, 2, times the difference, 2^63, is 0 modulo 2^64.
    words = torch.tensor([-(2**63), 7, 0, 7], dtype=torch.int64)
    swapped = words[[2, 1, 0, 3]]
    assert int((words * torch.arange(4)).sum()) == int((swapped * torch.arange(4)).sum())
    assert checksum(words.view(torch.uint8)) != checksum(swapped.view(torch.uint8))


def test_a_damaged_or_cut_buffer_is_refused() -> None:
    state = tensors()
    buffer = flat(state)
    handle = make_handle(RUN, 4, tensor_specs(state), checksum(buffer))
    verify_buffer(handle, buffer)
    with pytest.raises(WeightsError, match="version 4 of run weights arrived as 320 bytes, expected 384"):
        verify_buffer(handle, buffer[:320])
    with pytest.raises(WeightsError, match="320 bytes, expected 320, and their tensors take 384"):
        verify_buffer(handle.replace(num_bytes=320), buffer[:320])
    buffer[100] ^= 1
    with pytest.raises(WeightsError, match=r"arrived damaged.*publish them again"):
        verify_buffer(handle, buffer)


def test_read_only_memory_is_viewed_without_a_copy_or_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    memory = np.arange(64, dtype=np.uint8)
    memory.flags.writeable = False
    assert buffer_as_tensor(memory).data_ptr() == memory.ctypes.data
    assert not recwarn.list


def test_a_handle_is_small_json_and_a_transfer_is_of_the_slowest() -> None:
    handle = make_handle(RUN, 1, tensor_specs(tensors()), "ab")
    assert WeightsHandle.model_validate_json(handle.model_dump_json()) == handle
    loads = [
        LoadedWeights(version=1, num_bytes=384, read_seconds=read, load_seconds=load) for read, load in ((2, 1), (1, 3))
    ]
    assert WeightsTransfer.of("broadcast", SentWeights(handle=handle, seconds=0.5), loads) == WeightsTransfer(
        transport="broadcast", num_bytes=384, num_receivers=2, write_seconds=0.5, read_seconds=2, load_seconds=3
    )


class CopyingEngine:
    """Copies what it is given, as every engine does."""

    version = 0

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.version = version


class Policy:
    """The first rank of a policy."""

    def send(self, version: int, owner: bytes, words: int = LARGE) -> tuple[bytes, SentWeights]:
        state = tensors(version, words)
        return ObjectStoreSender(RUN).send(version, tensor_specs(state), state.items(), owner)

    def send_damaged(self, version: int, owner: bytes) -> tuple[bytes, SentWeights]:
        data, sent = self.send(version, owner, words=9)
        return data[:-60] + bytes(60), sent

    def send_fewer(self, version: int, owner: bytes) -> tuple[bytes, SentWeights]:
        state = tensors(version, LARGE)
        return ObjectStoreSender(RUN).send(version, tensor_specs(state), list(state.items())[:3], owner)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        self._meeting, handle = open_rendezvous(HOST, num_receivers)
        return handle

    def join(self, group: ProcessGroupHandle, timeout_seconds: float) -> None:
        self._group = WeightGroup(group, 0, HOST, torch.device("cpu"), timeout_seconds)

    def broadcast(
        self, version: int, bucket_bytes: int, words: int = 9, num_tensors: int = 7
    ) -> tuple[bytes, SentWeights]:
        state = tensors(version, words)
        self._taken: list[str] = []
        coming = ((name, self._take(name, tensor)) for name, tensor in list(state.items())[:num_tensors])
        return BroadcastSender(RUN, self._group, bucket_bytes).send(version, tensor_specs(state), coming, b"")

    def taken(self) -> list[str]:
        return self._taken

    def _take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._taken.append(name)
        return tensor


class Rollout:
    """A rollout worker."""

    def __init__(self) -> None:
        self._engine = CopyingEngine()

    def load(self, version: int, refs: list[Any], run_id: str = RUN, timeout_seconds: float = 60) -> LoadedWeights:
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


def promise(policy: Any, method: str, *args: Any) -> list[Any]:
    """The two promises of what a sending method returns."""
    return list(getattr(policy, method).options(num_returns=2).remote(*args))


def store_stats() -> Any:
    node = ray.nodes()[0]
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats


@pytest.mark.slow
@pytest.mark.parametrize("words", [9, LARGE])
def test_two_receivers_load_what_was_sent(policy: Any, rollouts: list[Any], words: int) -> None:
    refs = promise(policy, "send", 3, object_store.address(), words)
    loaded = ray.get([rollout.load.remote(3, refs) for rollout in rollouts])
    assert ray.get([rollout.holds.remote(3, words) for rollout in rollouts]) == [True, True]
    sent = ray.get(refs[1])
    assert sent.handle.num_bytes == flat_bytes(tensor_specs(tensors(3, words))) == loaded[0].num_bytes
    assert WeightsTransfer.of("object_store", sent, loaded).num_receivers == 2


@pytest.mark.slow
def test_twenty_versions_leave_nothing_in_the_object_store(policy: Any, rollouts: list[Any]) -> None:
    before = store_stats()
    for version in range(1, 21):
        refs = promise(policy, "send", version, object_store.address())
        ray.get([rollout.load.remote(version, refs) for rollout in rollouts])
        assert ray.get(rollouts[0].holds.remote(version))
        assert store_stats().num_object_store_primary_copies <= before.num_object_store_primary_copies + 1
        del refs
    wait_until(lambda: store_stats().object_store_bytes_used <= before.object_store_bytes_used)  # Ray frees in batches


@pytest.mark.slow
def test_wrong_versions_runs_and_damaged_buffers_are_refused(policy: Any, rollouts: list[Any]) -> None:
    good = promise(policy, "send", 5, object_store.address())
    ray.get(rollouts[0].load.remote(5, good))
    with pytest.raises(WeightsError, match="version 5 of run weights, expected version 6"):
        ray.get(rollouts[0].load.remote(6, good))
    with pytest.raises(WeightsError, match="expected version 5 of run other"):
        ray.get(rollouts[0].load.remote(5, good, "other"))
    with pytest.raises(WeightsError, match="version 7 of run weights arrived damaged"):
        ray.get(rollouts[0].load.remote(7, promise(policy, "send_damaged", 7, object_store.address())))
    with pytest.raises(WorkerLostError, match="did not send the weights of version 5 within 1 s"):
        ray.get(rollouts[0].load.remote(5, [good[0], policy.sleep.remote(3)], RUN, 1))
    assert ray.get(rollouts[0].holds.remote(5))


@pytest.mark.slow
def test_a_failed_send_is_told_to_the_receivers_and_leaves_no_memory_taken(policy: Any, rollouts: list[Any]) -> None:
    before, fallback = store_stats().object_store_bytes_primary_copy, store_stats().object_store_bytes_fallback
    for version in range(1, 25):  # together more than the object store holds
        refs = promise(policy, "send_fewer", version, object_store.address())
        with pytest.raises(WeightsError, match="'scale' is missing"):
            ray.get(rollouts[0].load.remote(version, refs))
    assert store_stats().object_store_bytes_primary_copy <= before
    assert store_stats().object_store_bytes_fallback == fallback
    good = promise(policy, "send", 30, object_store.address())
    ray.get(rollouts[0].load.remote(30, good))
    assert ray.get(rollouts[0].holds.remote(30))


def gather(policy: Any, rollouts: list[Any], timeout_seconds: float = 30) -> None:
    """Make the members one new group."""
    group = ray.get(policy.open_rendezvous.remote(len(rollouts)))
    joins = [rollout.join.remote(group, rank, timeout_seconds) for rank, rollout in enumerate(rollouts, start=1)]
    ray.get([policy.join.remote(group, timeout_seconds), *joins])


@pytest.mark.slow
def test_a_broadcast_in_buckets_of_any_size_arrives_whole(policy: Any, rollouts: list[Any]) -> None:
    gather(policy, rollouts)
    for version, (bucket_bytes, words) in enumerate([(64, 9), (192, 9), (2**20, 9), (2**20, LARGE)], start=40):
        sent = promise(policy, "broadcast", version, bucket_bytes, words)
        loaded = ray.get([rollout.receive.remote(version) for rollout in rollouts])
        assert ray.get([rollout.holds.remote(version, words) for rollout in rollouts]) == [True, True]
        state = tensors(version, words)
        expected = make_handle(RUN, version, tensor_specs(state), checksum(flat(state)))
        assert ray.get(sent[1]).handle == expected
        assert WeightsTransfer.of("broadcast", ray.get(sent[1]), loaded).num_bytes == expected.num_bytes
    # A version that isn't the asked one is refused, and the group goes on.
    promise(policy, "broadcast", 50, 64)
    loads = [rollouts[0].receive.remote(51), rollouts[1].receive.remote(50)]
    with pytest.raises(WeightsError, match="version 50 of run weights, expected version 51"):
        ray.get(loads[0])
    assert ray.get(loads[1]).version == 50
    promise(policy, "broadcast", 51, 64)
    ray.get([rollout.receive.remote(51) for rollout in rollouts])
    assert ray.get(rollouts[0].holds.remote(51, 9))


@pytest.mark.slow
def test_a_sender_that_fails_leaves_nobody_waiting(policy: Any, rollouts: list[Any]) -> None:
    gather(policy, rollouts, timeout_seconds=200)
    sent = promise(policy, "broadcast", 60, 64, 9, 3)
    for load in [rollout.receive.remote(60) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            ray.get(load)
    with pytest.raises(WeightsError, match="'scale' is missing"):
        ray.get(sent[1])
    with pytest.raises(WorkerLostError, match="has left the weight group; form a new one"):
        ray.get(promise(policy, "broadcast", 60, 64)[1])


@pytest.mark.slow
def test_a_killed_receiver_ends_the_group_and_another_is_gathered(policy: Any, rollouts: list[Any]) -> None:
    gather(policy, rollouts, timeout_seconds=3)
    rollouts[1].die.remote()
    sent = promise(policy, "broadcast", 70, 2**20, LARGE)
    with pytest.raises(WorkerLostError, match="member 1 of the weight group lost the others"):
        ray.get(rollouts[0].receive.remote(70))
    with pytest.raises(WorkerLostError, match="member 0 of the weight group lost the others"):
        ray.get(sent[1])
    assert ray.get(policy.taken.remote()) == list(tensors())  # so the policy's other ranks weren't left waiting
    gather(policy, rollouts[:1])
    promise(policy, "broadcast", 71, 2**20, LARGE)
    ray.get(rollouts[0].receive.remote(71))
    assert ray.get(rollouts[0].holds.remote(71))


@pytest.mark.slow
def test_members_that_do_not_come_are_lost(policy: Any) -> None:
    group = ray.get(policy.open_rendezvous.remote(1))
    with pytest.raises(WorkerLostError, match="member 0 of 2 could not join the weight group"):
        ray.get(policy.join.remote(group, 0.5))


@pytest.mark.slow
def test_a_policy_that_dies_is_a_lost_worker(policy: Any, rollouts: list[Any]) -> None:
    ray.kill(policy)
    with pytest.raises(WorkerLostError, match="could not send the weights of version 2"):
        ray.get(rollouts[0].load.remote(2, promise(policy, "send", 2, object_store.address())))


@pytest.mark.parametrize(
    ("setting", "gpus", "chosen"),
    [
        ("auto", ("a", "b", "c"), "broadcast"),
        ("auto", ("a", "b", "b"), "object_store"),
        ("auto", ("a", ""), "object_store"),
        ("auto", ("", ""), "object_store"),
        ("object_store", ("a", "b"), "object_store"),
        ("broadcast", ("a", "b"), "broadcast"),
        ("broadcast", ("", ""), "broadcast"),
    ],
)
def test_transport_is_chosen_by_what_the_workers_have(setting: str, gpus: tuple[str, ...], chosen: str) -> None:
    assert choose_transport(setting, gpus) == chosen


def test_transports_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a GPU of its own"):
        choose_transport("broadcast", ("a", "a"))
    with pytest.raises(ConfigError, match="needs a GPU of its own"):
        choose_transport("broadcast", ("a", ""))
    with pytest.raises(ConfigError, match="weight_transport = 'carrier pigeon'; use"):
        choose_transport("carrier pigeon", ("",))
    assert gpu_of(torch.device("cpu")) == ""


def wait_until(reached: Any, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, "the awaited moment never came"
        time.sleep(0.05)
