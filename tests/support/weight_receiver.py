"""A receiver of weights in a process of its own: the peak of its memory while it loads.

`python -m tests.support.weight_receiver MODEL GROUP [NOTES]`, with `ENVIRONMENT`, joins the group (JSON) as member 1,
loads a version twice, by broadcast and through shared memory, and prints each load's peak bytes above those before it,
in JSON. With a file for notes, its engine is a program, whose memory counts, too, and "own" is what the receiver itself
took from before the start of the program to the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from infra.engines.base import EngineModel, RolloutEngine
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.program.start import open_program
from infra.models.load import load_model
from infra.weights.carriers import BroadcastReceiver, SharedMemoryReceiver
from infra.weights.stream import load_weights
from infra.weights.weight_group import WeightGroup
from schemas.config.model import ModelConfig
from schemas.config.rollout import ProgramRollout
from schemas.step import ProcessGroupHandle
from tests.support import counted_engine
from tests.support.measured_memory import ENVIRONMENT, reset_peak, status_bytes
from tests.support.weight_tensors import RUN

HOST = "127.0.0.1"
MAX_TOKENS = 64


def start_receiver(model: Path, group: ProcessGroupHandle, *notes: Path) -> "subprocess.Popen[str]":
    """Start the process."""
    command = [sys.executable, "-m", "tests.support.weight_receiver", str(model), group.model_dump_json()]
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen([*command, *map(str, notes)], env=environment, stdout=subprocess.PIPE, text=True)


def main(folder: str, group: ProcessGroupHandle, notes: str = "") -> None:
    """Load by each carrier, after one load of each that pays for what a process pays for once."""
    torch.set_num_threads(1)
    start = reset_peak()
    engine = open_counted(folder, notes) if notes else TransformersEngine(load_model(ModelConfig(path=folder)))
    joined = WeightGroup(group, 1, HOST, torch.device("cpu"), 600)
    peaks = {}
    for version in range(1, 5):
        receiver = (BroadcastReceiver if version % 2 else SharedMemoryReceiver)(joined)
        base = reset_peak()
        if notes:
            Path(notes).write_text("")
            base = sum(map(counted_engine.pss_bytes, (os.getpid(), *engine.processes)))
        load_weights(joined, receiver, engine, RUN, version)
        peak = max(map(int, Path(notes).read_text().split())) if notes else status_bytes("VmHWM")
        peaks[type(receiver).__name__] = peak - base
    if notes:
        peaks["own"] = reset_peak() - start
        engine.close()
    print(json.dumps(peaks))


def open_counted(folder: str, notes: str) -> RolloutEngine:
    """Start the program that notes what it takes."""
    os.environ[counted_engine.NOTES] = notes
    rollout = ProgramRollout(program=counted_engine.__file__)
    return open_program(rollout, EngineModel(ModelConfig(path=folder), MAX_TOKENS))


if __name__ == "__main__":
    main(sys.argv[1], ProcessGroupHandle.model_validate_json(sys.argv[2]), *sys.argv[3:])
