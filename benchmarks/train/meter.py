"""Time and peak memory of one pass."""

import ctypes
import gc
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import torch
from transformers import PreTrainedModel

from benchmarks.train.paths import Path
from rl_core.scoring import PackedRow

STATUS, CLEAR_REFS = FilePath("/proc/self/status"), FilePath("/proc/self/clear_refs")
RESET_PEAK = "5"  # resets VmHWM, see proc(5)


@dataclass
class Meter:
    """The measurements of one path."""

    path: Path
    peak_mb: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second of all micro-batches, extrapolated from the ones that were run."""
        path = self.path
        return path.run_positions / statistics.median(self.seconds) * path.num_tokens / path.num_positions


def measure_peak(model: PreTrainedModel, meter: Meter, is_training: bool) -> None:
    """Record the memory of the largest micro-batch beyond the weights: activations and, in training, gradients."""
    meter.path.switch(model)
    before = reset_peak(model.device)
    _run(model, meter.path, [max(meter.path.micro_batches, key=lambda row: len(row.input_ids))], is_training)
    meter.peak_mb = (peak_bytes(model.device) - before) / 1e6
    model.zero_grad(set_to_none=True)


def measure_time(model: PreTrainedModel, meter: Meter, is_training: bool) -> None:
    """Record the time of all micro-batches: the forwards and backwards of one optimizer step."""
    meter.path.switch(model)
    _synchronize(model.device)
    start = time.perf_counter()
    _run(model, meter.path, meter.path.micro_batches, is_training)
    _synchronize(model.device)
    meter.seconds.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)


def _run(model: PreTrainedModel, path: Path, rows: list[PackedRow], is_training: bool) -> None:
    """Score micro-batches one after another; in training, accumulate their gradients."""
    with torch.set_grad_enabled(is_training):
        for row in rows:
            logprobs = path.score(model, row)
            if is_training:
                logprobs.mean().backward()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> int:
    """Reset the high-water mark, and return the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc still holds would mask the pass's own
    CLEAR_REFS.write_text(RESET_PEAK)
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that were in use at once since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
