"""Published weights: their layout, checksum, verification, and the choice of a transport."""

import numpy as np
import pytest
import torch

from infra.weights.checksum import _sums, checksum
from infra.weights.endpoint import gpu_of
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
from infra.weights.transport import choose_transport
from schemas.errors import ConfigError, WeightsError
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle, WeightsTransfer
from tests.infra.weight_tensors import RUN, flat, same, tensors


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
    values = np.random.default_rng(1).integers(-(2**63), 2**63, (70, 50))
    plain, weighted = _sums(torch.from_numpy(values))
    assert [plain % 2**64, weighted % 2**64] == [each % 2**64 for each in _sums(values)]


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


def test_a_damaged_or_truncated_buffer_is_rejected() -> None:
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


def test_a_handle_is_json_and_a_transfer_reports_the_slowest_receiver() -> None:
    handle = make_handle(RUN, 1, tensor_specs(tensors()), "ab")
    assert WeightsHandle.model_validate_json(handle.model_dump_json()) == handle
    loads = [
        LoadedWeights(version=1, num_bytes=384, read_seconds=read, load_seconds=load) for read, load in ((2, 1), (1, 3))
    ]
    assert WeightsTransfer.of("broadcast", SentWeights(handle=handle, seconds=0.5), loads) == WeightsTransfer(
        transport="broadcast", num_bytes=384, num_receivers=2, write_seconds=0.5, read_seconds=2, load_seconds=3
    )


@pytest.mark.parametrize(
    ("setting", "gpus", "chosen"),
    [
        ("auto", ("a", "b", "c"), "broadcast"),
        ("auto", ("a", "b", "b"), "shared_memory"),
        ("auto", ("a", ""), "shared_memory"),
        ("auto", ("", ""), "shared_memory"),
        ("shared_memory", ("a", "b"), "shared_memory"),
        ("broadcast", ("a", "b"), "broadcast"),
        ("broadcast", ("", ""), "broadcast"),
    ],
)
def test_the_transport_depends_on_the_workers_gpus(setting: str, gpus: tuple[str, ...], chosen: str) -> None:
    assert choose_transport(setting, gpus) == chosen


def test_impossible_transports_are_rejected() -> None:
    with pytest.raises(ConfigError, match="needs a GPU of its own"):
        choose_transport("broadcast", ("a", "a"))
    with pytest.raises(ConfigError, match="needs a GPU of its own"):
        choose_transport("broadcast", ("a", ""))
    with pytest.raises(ConfigError, match="weight_transport = 'carrier pigeon'; use"):
        choose_transport("carrier pigeon", ("",))
    assert gpu_of(torch.device("cpu")) == ""
