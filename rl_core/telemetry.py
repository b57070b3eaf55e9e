"""Measurements of a worker's phases as metrics: throughput, utilization, peak memory, and how full a plan is."""

import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING

from schemas.metrics import Max, Mean, Metrics
from schemas.plan import StepPlan

if TYPE_CHECKING:  # the driver imports no torch
    import torch

KIB = 2**10


def throughput(phase: str, num_tokens: int, seconds: float, operations: float, peak_flops: float | None) -> Metrics:
    """Return one worker's tokens per second in a phase, and its model FLOPs utilization (MFU).

    Workers are weighted by their time, so that merged values are per worker.

    Args:
        phase: The phase.
        num_tokens: Tokens that it worked on.
        seconds: Its time, in which it also waits for the other ranks.
        operations: Multiplications and additions that the model needs for them, see `ModelWork`.
        peak_flops: What the worker's GPUs could do per second; None: not known, and the utilization is absent.
    """
    metrics: Metrics = {f"step/{phase}_tokens_per_second": Mean(total=num_tokens, weight=seconds)}
    if peak_flops is not None:
        metrics[f"step/{phase}_mfu"] = Mean(total=operations, weight=peak_flops * seconds)
    return metrics


def micro_batch_seconds(seconds: Mapping[str, float], num_micros: int) -> Metrics:
    """Return the time of each part of one rank's updates per micro-batch; merged, the mean and the slowest rank's.

    Args:
        seconds: By part, over all micro-batches.
        num_micros: The rank's micro-batches, dummies included.
    """
    means: Metrics = {f"update/{part}_seconds": Mean(total=total, weight=num_micros) for part, total in seconds.items()}
    slowest: Metrics = {f"update/{part}_seconds_max": Max(value=total / num_micros) for part, total in seconds.items()}
    return means | slowest


def packing(plan: StepPlan) -> Metrics:
    """Return how full the micro-batches of a plan's updates are, and how far apart its ranks' costs."""
    updates = plan.updates
    room = [plan.num_ranks * update.num_micros * plan.token_budget for update in updates]
    fill = sum(update.num_tokens / tokens for update, tokens in zip(updates, room, strict=True))
    return {
        "packing/fill": Mean(total=fill, weight=len(updates)),
        "packing/imbalance": Max(value=max(update.imbalance for update in updates)),
    }


def take_peak_memory(device: "torch.device") -> dict[str, int]:
    """Return this process's peak memory in bytes, by kind.

    On CUDA, what tensors took (`allocated`) and what torch's allocator held (`reserved`) since the last call; on a CPU,
    the process's resident memory (`rss`) since its start.
    """
    import torch

    if device.type != "cuda":
        return {"rss": KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    peaks = {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def memory(worker: str, peaks: Mapping[str, int]) -> Metrics:
    """Return a worker's peak memory; see `take_peak_memory`."""
    return {f"memory/{worker}_{kind}_bytes": Max(value=num_bytes) for kind, num_bytes in peaks.items()}
