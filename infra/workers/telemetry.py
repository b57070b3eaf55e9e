"""What one worker measures of its own work: throughput, utilization, peak memory, and a profile of a phase."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from infra.models.load import build_meta_model
from infra.storage.runs import TRACE_SUFFIX, RunDirectory, write_trace
from rl_core import telemetry
from rl_core.planning.hardware import gpu_peak_flops
from rl_core.planning.throughput import ModelWork
from schemas.config.model import ModelConfig
from schemas.metrics import Metrics
from schemas.step import RunHandle


class WorkerTelemetry:
    """The measurements of one worker.

    Args:
        worker: Its name, such as `policy-0`.
        model: Its model.
        device: Where it computes.
        dtype: The dtype that it computes in, which decides the GPU's peak.
        num_gpus: The GPUs that it has.
    """

    def __init__(self, worker: str, model: ModelConfig, device: torch.device, dtype: str, num_gpus: int = 1) -> None:
        self.worker, self._device = worker, device
        peak = gpu_peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
        self._peak_flops = None if peak is None else num_gpus * peak
        self._work = None if peak is None else ModelWork.of(build_meta_model(model))

    def throughput(
        self, phase: str, num_tokens: int, seconds: float, operations: Callable[[ModelWork], float]
    ) -> Metrics:
        """Return tokens per second, and on a GPU of known peak the utilization, of a phase.

        Args:
            phase: The phase.
            num_tokens: Tokens that it worked on.
            seconds: Its time.
            operations: Return the operations that the model needs for it.
        """
        needed = operations(self._work) if self._work is not None else 0.0
        return telemetry.throughput(phase, num_tokens, seconds, needed, self._peak_flops)

    def memory(self, peaks: Mapping[str, int] | None = None) -> Metrics:
        """Return the worker's peak memory: `peaks`, see `take_peak_memory`; None: this process's."""
        return telemetry.memory(self.worker, telemetry.take_peak_memory(self._device) if peaks is None else peaks)


@contextmanager
def profiled(run: RunHandle, step: int, worker: str, phase: str) -> Iterator[None]:
    """Write a trace of the block to the run's directory, if the config profiles this step; else do nothing."""
    if step not in run.config.runtime.profile_steps:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as recorded, record_function(phase):
        yield
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{TRACE_SUFFIX}"
        recorded.export_chrome_trace(str(path))
        write_trace(RunDirectory.of(run), step, worker, phase, path.read_bytes())
