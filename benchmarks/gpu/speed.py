"""Model FLOPs utilization (MFU) of packed scoring and training: random weights in bfloat16, one size of model."""

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.results import CheckResult, Figure, Settings
from benchmarks.train.meter import Meter, measure_peak, measure_time
from benchmarks.train.models import make_model
from benchmarks.train.paths import Workload, packed_path, random_lengths
from benchmarks.train.run import utilization

GOALS = {"scoring": 0.6, "training": 0.4}


@dataclass(frozen=True)
class Batch:
    """The rows that are scored and trained on, in tokens."""

    num_tokens: int = 65_536
    fill: float = 0.25
    longest: int = 4096
    token_budget: int = 8192  # of which the activations of 4 B weights fit into 80 GB
    chunk_tokens: int = 1024
    repetitions: int = 5


TWIN_BATCH = Batch(num_tokens=512, longest=128, token_budget=256, chunk_tokens=64, repetitions=1)


def check(settings: Settings, folder: Path, *, model: str) -> CheckResult:
    """Measure tokens per second, MFU and peak memory of one size of model, against the goals for MFU."""
    batch, device = TWIN_BATCH if settings.is_twin else Batch(), torch.device(settings.device)
    network = make_model(model, device, torch.bfloat16)
    workload = Workload(
        lengths=np.sort(random_lengths(batch.num_tokens, batch.fill, batch.longest)),
        vocab_size=network.config.vocab_size,
        token_budget=batch.token_budget,
        chunk_tokens=batch.chunk_tokens,
        device=device,
    )
    figures: dict[str, Figure] = {}
    missed = []
    for name, goal in GOALS.items():
        meter, is_training = Meter(packed_path(workload)), name == "training"
        measure_peak(network, meter, is_training)  # also warms up
        for _ in range(batch.repetitions):
            measure_time(network, meter, is_training)
        mfu = utilization(network, meter, is_training, settings.peak_tflops)
        figures |= {
            f"{name} MFU": round(mfu, 4),
            f"{name} tokens/s": round(meter.tokens_per_second),
            f"{name} MB beyond weights": round(meter.peak_mb),
            f"{name} seconds": round(statistics.median(meter.seconds), 4),
        }
        if mfu < goal and not settings.is_twin:
            missed.append(f"MFU of {name} is {mfu:.1%}, the goal is {goal:.0%}")
    return CheckResult.of(f"speed {model}", figures, missed)
