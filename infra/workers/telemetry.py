"""What one worker measures of its own work: throughput, utilization and peak memory."""

from collections.abc import Callable, Mapping

import torch

from infra.models.load import build_meta_model
from rl_core import telemetry
from rl_core.planning.hardware import gpu_peak_flops
from rl_core.planning.throughput import ModelWork
from schemas.config.model import ModelConfig
from schemas.metrics import Metrics


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
