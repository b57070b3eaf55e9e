"""The memory that a receiver of weights takes beyond its engine's, measured in a process of its own."""

import json
from pathlib import Path

import pytest
import torch

from infra.models.flat_tensors import flat_bytes, tensor_specs
from infra.models.load import load_model
from infra.models.tiny import make_model
from infra.ray.rendezvous import Rendezvous
from infra.weights.buckets import sent_bytes, split_buckets
from infra.weights.carriers import BroadcastSender, SharedMemorySender
from infra.weights.stream import send_weights
from infra.weights.weight_group import WeightGroup
from schemas.config.model import ModelConfig
from schemas.weights import WeightsHandle
from tests.services.test_planned_memory import MODEL
from tests.support.weight_receiver import HOST, start_receiver
from tests.support.weight_tensors import RUN

BUCKET_BYTES = 8 * 2**20
SPARE_BYTES = 2 * 2**20  # of everything that is not a bucket


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are more than 12 buckets."""
    folder = tmp_path_factory.mktemp("large") / "model"
    make_model(folder, **{**MODEL, "vocab_size": 2048, "num_hidden_layers": 8})
    return folder


def peaks_of_receiver(folder: Path, shared_memory: Path, *notes: Path) -> dict[str, int]:
    """Send a model's weights four times, by each carrier in turn; return what their receiver measures."""
    model = load_model(ModelConfig(path=str(folder)))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    specs = tensor_specs(weights)
    assert max(flat_bytes(bucket) for bucket in split_buckets(specs, BUCKET_BYTES)) <= BUCKET_BYTES
    assert sent_bytes(specs, BUCKET_BYTES) > 12 * BUCKET_BYTES
    rendezvous = Rendezvous(HOST, 2)
    with start_receiver(folder, rendezvous.group, *notes) as receiver:
        group = WeightGroup(rendezvous.group, 0, HOST, torch.device("cpu"), 600)
        for version in range(1, 5):
            sender = BroadcastSender(group) if version % 2 else SharedMemorySender(group, shared_memory)
            sent = WeightsHandle(run_id=RUN, version=version, tensors=specs, bucket_bytes=BUCKET_BYTES)
            send_weights(group, sender, sent, weights.items())
        output, _ = receiver.communicate()
    peaks: dict[str, int] = json.loads(output)
    return peaks


@pytest.mark.extended
def test_a_receiver_takes_two_buckets_at_most(folder: Path, tmp_path: Path) -> None:
    peaks = peaks_of_receiver(folder, tmp_path)
    assert peaks["BroadcastReceiver"] <= 2 * BUCKET_BYTES + SPARE_BYTES, peaks
    assert peaks["SharedMemoryReceiver"] <= BUCKET_BYTES + SPARE_BYTES, peaks


@pytest.mark.extended
def test_a_receiver_whose_engine_is_a_program_takes_one_bucket_more_at_most(folder: Path, tmp_path: Path) -> None:
    peaks = peaks_of_receiver(folder, tmp_path, tmp_path / "notes")
    assert peaks["BroadcastReceiver"] <= 3 * BUCKET_BYTES + SPARE_BYTES, peaks
    assert peaks["SharedMemoryReceiver"] <= BUCKET_BYTES + SPARE_BYTES, peaks  # mapped by both, it counts once
    assert peaks["own"] <= 2 * BUCKET_BYTES, peaks  # no copy of the weights stays with the worker
