"""A receiver of weights in a process of its own: the peak of its memory while it loads.

`python -m tests.support.weight_receiver MODEL GROUP`, with `ENVIRONMENT`, joins the group (JSON) as member 1, loads a
version twice, by broadcast and through shared memory, and prints each load's peak bytes above those before it, in JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from infra.engines.embedded.engine import TransformersEngine
from infra.models.load import load_model
from infra.weights.carriers import BroadcastReceiver, SharedMemoryReceiver
from infra.weights.stream import load_weights
from infra.weights.weight_group import WeightGroup
from schemas.config.model import ModelConfig
from schemas.step import ProcessGroupHandle
from tests.support.measured_memory import ENVIRONMENT, reset_peak, status_bytes
from tests.support.weight_tensors import RUN

HOST = "127.0.0.1"


def start_receiver(model: Path, group: ProcessGroupHandle) -> "subprocess.Popen[str]":
    """Start the process."""
    command = [sys.executable, "-m", "tests.support.weight_receiver", str(model), group.model_dump_json()]
    return subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def main(folder: str, group: ProcessGroupHandle) -> None:
    """Load by each carrier, after one load of each that pays for what a process pays for once."""
    torch.set_num_threads(1)
    engine = TransformersEngine(load_model(ModelConfig(path=folder)))
    joined = WeightGroup(group, 1, HOST, torch.device("cpu"), 600)
    peaks = {}
    for version in range(1, 5):
        receiver = (BroadcastReceiver if version % 2 else SharedMemoryReceiver)(joined)
        base = reset_peak()
        load_weights(joined, receiver, engine, RUN, version)
        peaks[type(receiver).__name__] = status_bytes("VmHWM") - base
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(sys.argv[1], ProcessGroupHandle.model_validate_json(sys.argv[2]))
