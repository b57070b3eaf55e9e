"""Published weights: their layout, checksum, buckets, and the choice of a transport."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infra.engines.program import frames
from infra.models.flat_tensors import (
    assign_slots,
    buffer_as_tensor,
    flat_bytes,
    tensor_specs,
    tensor_views,
    write_tensors,
)
from infra.weights.buckets import gathered, sent_bytes, sent_specs, split_buckets, with_whole_blocks
from infra.weights.endpoint import gpu_of
from infra.weights.stream import checksum
from infra.weights.sync import choose_route
from rl_core.training.sharding import single_rank_mesh
from schemas.errors import ConfigError, WeightsError
from schemas.weights import (
    LoadedWeights,
    SentWeights,
    TensorSpec,
    WeightGroupMember,
    WeightsHandle,
    WeightsTransfer,
)
from tests.support.weight_tensors import RUN, flat, same, tensors


def test_the_layout_is_aligned_zero_padded_and_read_back_without_a_copy() -> None:
    state = tensors()
    placed = assign_slots(tensor_specs(state))
    # 60, 14, 0, 8, 48, 3 and 36 bytes, each starting at the next multiple of 64
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


def test_tensors_that_do_not_match_their_specs_are_rejected() -> None:
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


def test_the_sums_of_torch_used_on_cuda_equal_those_of_numpy() -> None:
    values = np.random.default_rng(1).integers(-(2**63), 2**63, 5_000)
    assert frames.checksum(torch.from_numpy(values), rows=3) == frames.checksum(values)


@pytest.mark.parametrize("seed", range(20))
def test_the_checksum_detects_flipped_bits_and_swapped_words(seed: int) -> None:
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


def test_the_checksum_detects_swapped_signs() -> None:
    # 64-bit position-weighted sums alone don't: the distance, 2, times the difference, 2^63, is 0 modulo 2^64.
    words = torch.tensor([-(2**63), 7, 0, 7], dtype=torch.int64)
    swapped = words[[2, 1, 0, 3]]
    assert int((words * torch.arange(4)).sum()) == int((swapped * torch.arange(4)).sum())
    assert checksum(words.view(torch.uint8)) != checksum(swapped.view(torch.uint8))


def test_buckets_hold_whole_blocks_unless_those_are_larger() -> None:
    def sizes(shapes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
        specs = [TensorSpec(name=name, dtype="uint8", shape=(size,)) for name, size in shapes.items()]
        assert sent_bytes(specs, bucket_bytes) == sum(-(-size // 64) * 64 for size in shapes.values())
        return [
            [spec.name.rpartition("layers.")[2] for spec in bucket] for bucket in split_buckets(specs, bucket_bytes)
        ]

    layer = {"attn.q.weight": 64, "attn.k.weight": 1, "mlp.up.weight": 128, "mlp.experts.3.up.weight": 100}
    shapes = {"embed.weight": 65} | {f"layers.{n}.{name}": size for n in range(2) for name, size in layer.items()}
    attn, mlp = ["attn.q.weight", "attn.k.weight"], ["mlp.up.weight", "mlp.experts.3.up.weight"]
    first, second = ([[f"{n}.{name}" for name in block] for block in (attn, mlp)] for n in range(2))
    # 128, 64 + 64, 128 + 128, 64 + 64, 128 + 128
    assert sizes(shapes, 256) == [["embed.weight", *first[0]], first[1], second[0], second[1]]
    assert sizes(shapes, 384) == [["embed.weight", *first[0]], [*first[1], *second[0]], second[1]]
    assert sizes(shapes, 128) == [
        ["embed.weight"],
        first[0],
        *([n] for n in first[1]),
        second[0],
        *([n] for n in second[1]),
    ]
    assert [len(bucket) for bucket in sizes(shapes, 64)] == [1] * 9  # a larger tensor is a bucket of its own
    assert split_buckets((), 64) == [[]]


def test_matrices_are_sent_in_the_engines_dtype_and_vectors_as_they_are() -> None:
    state = {"up.weight": torch.randn(3, 5), "norm.weight": torch.randn(5), "mask": torch.ones(2, 2, dtype=torch.bool)}
    specs = sent_specs(state, "bfloat16")
    assert [spec.dtype for spec in specs] == ["bfloat16", "float32", "bool"]
    sent = dict(gathered(state, specs))
    engine = torch.empty(3, 5, dtype=torch.bfloat16)
    assert torch.equal(sent["up.weight"], engine.copy_(state["up.weight"]))  # rounded as an engine would
    assert torch.equal(sent["norm.weight"], state["norm.weight"])
    assert sent_specs(state, "float32") == tensor_specs(state)


@pytest.mark.usefixtures("process_group")
def test_shards_are_gathered_in_the_dtype_in_which_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"up.weight": torch.randn(3, 5), "norm.weight": torch.randn(5)}
    mesh, moved, gather = single_rank_mesh("cpu"), list[torch.dtype](), DTensor.full_tensor
    weights = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    monkeypatch.setattr(DTensor, "full_tensor", lambda shard: moved.append(shard.dtype) or gather(shard))
    sent = dict(gathered(weights, sent_specs(weights, "bfloat16")))
    assert moved == [torch.bfloat16, torch.float32]
    assert torch.equal(sent["up.weight"], whole["up.weight"].to(torch.bfloat16))
    assert torch.equal(sent["norm.weight"], whole["norm.weight"])


def test_a_changed_weight_takes_its_block_with_it() -> None:
    names = [
        "embed.weight",
        "layers.0.attn.q.weight",
        "layers.0.attn.k.weight",
        "layers.0.mlp.up.weight",
        "norm.weight",
    ]
    weights = dict.fromkeys(names, torch.zeros(1))
    assert list(with_whole_blocks(weights, ["layers.0.attn.k.weight", "norm.weight"])) == [*names[1:3], names[4]]
    assert with_whole_blocks(weights, []) == {}


def test_read_only_memory_is_viewed_without_a_copy_or_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    memory = np.arange(64, dtype=np.uint8)
    memory.flags.writeable = False
    assert buffer_as_tensor(memory).data_ptr() == memory.ctypes.data
    assert not recwarn.list


def test_a_handle_is_json_and_a_transfer_reports_the_slowest_receiver() -> None:
    handle = WeightsHandle(run_id=RUN, version=1, tensors=tensor_specs(tensors()), bucket_bytes=64)
    assert WeightsHandle.model_validate_json(handle.model_dump_json()) == handle
    loads = [
        LoadedWeights(version=1, num_bytes=384, read_seconds=read, load_seconds=load, probe_difference=difference)
        for read, load, difference in ((2, 1, 0.1), (1, 3, 0.2))
    ]
    sent = SentWeights(version=1, num_bytes=384, seconds=0.5, probe_seconds=0.25)
    assert WeightsTransfer.of("broadcast", sent, loads) == WeightsTransfer(
        transport="broadcast",
        num_bytes=384,
        num_receivers=2,
        write_seconds=0.5,
        read_seconds=2,
        load_seconds=3,
        probe_seconds=0.25,
        probe_difference=0.2,
    )


@pytest.mark.parametrize(
    ("setting", "gpus", "nodes", "chosen"),
    [
        ("auto", "abc", "xyx", ("broadcast", True)),
        ("auto", "abb", "xxx", ("shared_memory", False)),
        ("auto", "abb", "xyx", ("broadcast", False)),
        ("auto", "--", "xx", ("shared_memory", False)),
        ("auto", "--", "xy", ("broadcast", False)),
        ("shared_memory", "ab", "xx", ("shared_memory", False)),
        ("broadcast", "ab", "xx", ("broadcast", True)),
        ("broadcast", "a-", "xx", ("broadcast", False)),
    ],
)
def test_the_route_depends_on_the_workers_gpus_and_nodes(
    setting: str, gpus: str, nodes: str, chosen: tuple[str, bool]
) -> None:
    route = choose_route(setting, members(gpus, nodes))
    assert (route.transport, route.on_gpus) == chosen
    assert route.dtype == "bfloat16"


def members(gpus: str, nodes: str) -> list[WeightGroupMember]:
    """Return the policy and rollout workers, of which each letter names the GPU (-: none) or the node."""
    return [
        WeightGroupMember(node=node, gpu=gpu.strip("-"), dtype="bfloat16" if number else "")
        for number, (gpu, node) in enumerate(zip(gpus, nodes, strict=True))
    ]


def test_impossible_transports_are_rejected() -> None:
    with pytest.raises(ConfigError, match='are on 2 nodes; use "auto" or "broadcast"'):
        choose_route("shared_memory", members("--", "xy"))
    with pytest.raises(ConfigError, match=r"weights\.transport = 'carrier pigeon'; use"):
        choose_route("carrier pigeon", members("--", "xx"))
    assert gpu_of(torch.device("cpu")) == ""
