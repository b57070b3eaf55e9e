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


@pytest.mark.extended
def test_a_receiver_takes_two_buckets_at_most(tmp_path: Path) -> None:
    make_model(tmp_path / "model", **{**MODEL, "vocab_size": 2048, "num_hidden_layers": 8})
    model = load_model(ModelConfig(path=str(tmp_path / "model")))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    specs = tensor_specs(weights)
    assert max(flat_bytes(bucket) for bucket in split_buckets(specs, BUCKET_BYTES)) <= BUCKET_BYTES
    assert sent_bytes(specs, BUCKET_BYTES) > 12 * BUCKET_BYTES
    rendezvous = Rendezvous(HOST, 2)
    with start_receiver(tmp_path / "model", rendezvous.group) as receiver:
        group = WeightGroup(rendezvous.group, 0, HOST, torch.device("cpu"), 600)
        for version in range(1, 5):
            sender = BroadcastSender(group) if version % 2 else SharedMemorySender(group, tmp_path)
            sent = WeightsHandle(run_id=RUN, version=version, tensors=specs, bucket_bytes=BUCKET_BYTES)
            send_weights(group, sender, sent, weights.items())
        output, _ = receiver.communicate()
    peaks = json.loads(output)
    assert peaks["BroadcastReceiver"] <= 2 * BUCKET_BYTES + SPARE_BYTES, peaks
    assert peaks["SharedMemoryReceiver"] <= BUCKET_BYTES + SPARE_BYTES, peaks
