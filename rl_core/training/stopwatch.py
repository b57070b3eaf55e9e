"""The seconds of an update's parts, without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function


class Stopwatch:
    """Adds up the seconds of parts of a computation, which are also ranges in a trace of torch's profiler.

    On CUDA, events on the current stream bound a part, so that the host runs ahead as it would without them; on a CPU,
    the wall clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_running = device, False
        self._spans: list[tuple[str, Any, Any]] = []  # part, start, end: CUDA events, or seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the parts in the block; those outside of such a block are only ranges of a trace."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the block's seconds to a part."""
        with record_function(part):
            if not self._is_running:
                yield
                return
            start = self._mark()
            yield
            self._spans.append((part, start, self._mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call; on CUDA, once the device has finished them."""
        spans, self._spans = self._spans, []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = defaultdict[str, float](float)
        for part, start, end in spans:
            seconds[part] += start.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - start
        return dict(seconds)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def time_collectives(module: nn.Module, stopwatch: Stopwatch) -> None:
    """Measure the collectives of a sharded module as the part `collectives`: gathers of weights, sums of gradients.

    FSDP calls them in forward and backward: on CUDA on streams of their own, at the same time as these compute. Sums
    over replicas are not among them. No-op if the module is not sharded.
    """
    gather, scatter = _AllGather(stopwatch), _ReduceScatter(stopwatch)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # torch exports no base class of what it takes here
            part.set_custom_all_gather(gather)  # type: ignore[arg-type]
            part.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


class _Collective:
    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._stopwatch("collectives"):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group, async_op)
        return work


class _ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._stopwatch("collectives"):
            work: dist.Work | None = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
        return work
