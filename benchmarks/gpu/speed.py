"""Model FLOPs utilization (MFU) of packed scoring and training: random weights in bfloat16, one size of model."""

import statistics
from pathlib import Path

import torch

from benchmarks.gpu.passes import Batch, packed_pass, padded_pass
from benchmarks.gpu.results import CheckResult, Figure, Settings
from benchmarks.models import make_model

GOALS = {"scoring": 0.6, "training": 0.4}
# The activations of a forward of 4 B weights fit into 80 GB.
BATCH = Batch(num_tokens=65_536, fill=0.25, longest=4096, token_budget=8192, chunk_tokens=1024)
TWIN_BATCH = Batch(num_tokens=512, fill=0.25, longest=128, token_budget=256, chunk_tokens=64)
REPETITIONS = 5


def check(settings: Settings, folder: Path, *, model: str) -> CheckResult:
    """Measure tokens per second, MFU and peak memory of one size of model, against the goals for MFU.

    Padded passes over the same rows are measured next to them, for the ratio.
    """
    batch, repetitions = (TWIN_BATCH, 1) if settings.is_twin else (BATCH, REPETITIONS)
    network = make_model(model, torch.device(settings.device), torch.bfloat16)
    figures: dict[str, Figure] = {}
    missed = []
    for name, goal in GOALS.items():
        packed, padded, is_training = packed_pass(batch, network), padded_pass(batch, network), name == "training"
        for each in (packed, padded):
            each.measure_peak(network, is_training)  # also warms up
        for _ in range(repetitions):
            packed.measure_time(network, is_training)
        padded.measure_time(network, is_training)
        mfu = packed.utilization(network, is_training, settings.peak_tflops)
        figures |= {
            f"{name} MFU": round(mfu, 4),
            f"{name} tokens/s": round(packed.tokens_per_second),
            f"{name} MB beyond weights": round(packed.peak_mb),
            f"{name} seconds": round(statistics.median(packed.seconds), 4),
            f"{name} packed / padded, times fill": round(
                packed.tokens_per_second / padded.tokens_per_second * batch.fill, 3
            ),
        }
        if mfu < goal and not settings.is_twin:
            missed.append(f"MFU of {name} is {mfu:.1%}, the goal is {goal:.0%}")
    return CheckResult.of(f"speed {model}", figures, missed)
