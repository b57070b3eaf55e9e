"""The measurement: all cases in one process, the paths of each case in turn."""

import logging
import os
import platform
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.train.meter import Meter, measure_peak, measure_time
from benchmarks.train.models import make_model
from benchmarks.train.paths import (
    Workload,
    all_paths,
    packed_logprobs,
    padded_logprobs,
    random_lengths,
    random_row,
)
from rl_core.planning.throughput import ModelWork
from rl_core.scoring import use_packed_attention, use_padded_attention
from schemas.errors import ConfigError, ScoringError

logger = logging.getLogger(__name__)

IDEAL, EQUAL_COUNT = "dense", "dense_equal_count"
SECONDARY = ("padded", "row_by_row", EQUAL_COUNT)  # measured less often: slow, or of less interest
WARM_UP_TOKENS = 256
VOCABULARY_MODEL = "wide-vocabulary"
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 1.0}  # nats between packed and padded, for any one token


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    models: tuple[str, ...] = ("small", "mid")
    fills: tuple[float, ...] = (0.10, 0.25, 0.50)
    tokens: tuple[int, ...] = (4096, 16_384)
    longest: int = 1024
    token_budget: int = 8192
    chunk_tokens: int = 1024
    repetitions: int = 3
    max_repetitions: int = 15
    min_seconds: float = 6.0  # minimum time per path, except secondary ones, within `max_repetitions`
    secondary_repetitions: int = 1
    vocabulary_tokens: tuple[int, ...] = (2048, 4096, 8192)
    device: str = "auto"
    dtype: str = "float32"
    threads: int = 0  # 0: all cores
    peak_tflops: float = 989.0  # of the GPU, dense bfloat16; the default is an H200's


QUICK = Plan(
    models=("tiny",),
    fills=(0.25,),
    tokens=(512,),
    longest=128,
    token_budget=512,
    chunk_tokens=64,
    repetitions=1,
    min_seconds=0.0,
    vocabulary_tokens=(128,),
)


def measure(plan: Plan) -> dict[str, Any]:
    """Measure all cases.

    Returns:
        The report: JSON values.

    Raises:
        ConfigError: The plan can't be run here.
        ScoringError: Packed and padded log-probs differ.
    """
    device, dtype = _device(plan), getattr(torch, plan.dtype)
    torch.set_num_threads(plan.threads or os.cpu_count() or 1)
    cases, agreement = [], []
    for name in plan.models:
        model = make_model(name, device, dtype)
        _warm_up(plan, model)
        for num_tokens in plan.tokens:
            for fill in plan.fills:
                workload = _workload(plan, model, num_tokens, fill)
                agreement.append({"model": name, "fill": fill} | _agreement(plan, model, workload))
                for is_training in (False, True):
                    logger.info("%s, %d tokens, fill %.2f, training %s", name, num_tokens, fill, is_training)
                    shared = {"model": name, "fill": fill, "tokens": num_tokens}
                    cases.extend(shared | case for case in _measure_case(plan, model, workload, is_training))
    return {
        "machine": _machine(plan, device),
        "cases": cases,
        "agreement": agreement,
        "vocabulary": _measure_vocabulary(plan, device, dtype),
        **_summary(cases),
    }


def _warm_up(plan: Plan, model: PreTrainedModel) -> None:
    """Run every path on a small batch, so that library initialization doesn't count as memory of the first case."""
    for path in all_paths(_workload(plan, model, WARM_UP_TOKENS, 0.5)):
        measure_peak(model, Meter(path), is_training=True)


def _measure_case(plan: Plan, model: PreTrainedModel, workload: Workload, is_training: bool) -> list[dict[str, Any]]:
    meters = [Meter(path) for path in all_paths(workload)]
    for meter in meters:  # also warms up
        measure_peak(model, meter, is_training)
    _time_in_turn(plan, model, meters, is_training)
    speeds = {meter.path.name: meter.tokens_per_second for meter in meters}
    cases = []
    for meter in meters:
        path, speed = meter.path, speeds[meter.path.name]
        case = {
            "pass": "train" if is_training else "logprob",
            "path": path.name,
            "rows": len(workload.lengths),
            "positions": path.num_positions,
            "repetitions": len(meter.seconds),
            "tokens_per_s": speed,
            "peak_mb": meter.peak_mb,
            "fraction_of_ideal": speed / speeds[IDEAL],
            "fraction_of_equal_count": speed / speeds[EQUAL_COUNT],
        }
        if path.name == "packed":
            case["speedup_x_fill"] = speed / speeds["padded"] * workload.fill
        if model.device.type == "cuda":
            case["mfu"] = utilization(model, meter, is_training, plan.peak_tflops)
        cases.append(case)
    return cases


def _time_in_turn(plan: Plan, model: PreTrainedModel, meters: list[Meter], is_training: bool) -> None:
    """Time all paths in turn, short ones more often, since a fraction of a second is too noisy."""
    repetition, min_seconds = 0, 0.0
    while repetition < plan.repetitions or (repetition < plan.max_repetitions and min_seconds < plan.min_seconds):
        for meter in meters:
            if repetition < plan.secondary_repetitions or meter.path.name not in SECONDARY:
                measure_time(model, meter, is_training)
        repetition += 1
        min_seconds = min(sum(meter.seconds) for meter in meters if meter.path.name not in SECONDARY)


def utilization(model: PreTrainedModel, meter: Meter, is_training: bool, peak_tflops: float) -> float:
    """Return the model FLOPs utilization (MFU): the model's own operations per second over the device's peak."""
    rows, work = meter.path.micro_batches, ModelWork.of(model)
    lengths, responses = (
        torch.cat(parts).cpu().numpy()
        for parts in zip(*((row.cu_seqlens.diff(), row.response_lengths) for row in rows), strict=True)
    )
    prompts = lengths - responses
    operations = (
        work.update(prompts, responses, checkpointing=False) if is_training else work.forward(prompts, responses)
    )
    return operations / int(lengths.sum()) * meter.tokens_per_second / (peak_tflops * 1e12)


@torch.no_grad()
def _agreement(plan: Plan, model: PreTrainedModel, workload: Workload) -> dict[str, Any]:
    """Compare packed and padded log-probs of as many rows as one padded forward holds."""
    lengths = workload.lengths[: max(2, workload.token_budget // int(workload.lengths.max()))]
    row = random_row(lengths, workload)
    use_packed_attention(model)
    packed = packed_logprobs(workload, model, row)
    use_padded_attention(model)
    difference = (packed - padded_logprobs(workload, 0, model, row)).abs()
    if not (largest := float(difference.max())) <= (limit := MAX_DIFFERENCE[plan.dtype]):
        raise ScoringError(f"packed and padded log-probs differ by {largest:.3g} nats (limit {limit:g}); not timed")
    return {"targets": len(packed), "max_difference": largest, "mean_difference": float(difference.mean())}


def _measure_vocabulary(plan: Plan, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the peak memory of packed forward and backward with a vocabulary of 151,936, and its logits' size."""
    model = make_model(VOCABULARY_MODEL, device, dtype)
    _warm_up(plan, model)
    figures = []
    for num_tokens in plan.vocabulary_tokens:
        workload = _workload(plan, model, num_tokens, 0.5)
        meter = Meter(all_paths(workload)[0])
        measure_peak(model, meter, is_training=True)
        num_targets = sum(len(row.targets) for row in meter.path.micro_batches)
        figures.append(
            {
                "tokens": num_tokens,
                "vocab_size": workload.vocab_size,
                "chunk_tokens": plan.chunk_tokens,
                "peak_mb": meter.peak_mb,
                "chunk_logits_mb": plan.chunk_tokens * workload.vocab_size * 4 / 1e6,
                "all_logits_mb": num_targets * workload.vocab_size * 4 / 1e6,
            }
        )
    return figures


def _workload(plan: Plan, model: PreTrainedModel, num_tokens: int, fill: float) -> Workload:
    return Workload(
        lengths=random_lengths(num_tokens, fill, min(plan.longest, num_tokens // 2)),
        vocab_size=model.config.vocab_size,
        token_budget=plan.token_budget,
        chunk_tokens=plan.chunk_tokens,
        device=model.device,
    )


def _summary(cases: list[dict[str, Any]]) -> dict[str, float]:
    packed = [case for case in cases if case["path"] == "packed"]
    return {
        "min_fraction_of_ideal": min(case["fraction_of_ideal"] for case in packed),
        "min_fraction_of_equal_count": min(case["fraction_of_equal_count"] for case in packed),
        "min_speedup_x_fill": min(case["speedup_x_fill"] for case in packed),
    }


def _device(plan: Plan) -> torch.device:
    if plan.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: {plan.device!r} is not one of auto, cpu, cuda")
    if plan.dtype not in MAX_DIFFERENCE:
        raise ConfigError(f"--dtype: {plan.dtype!r} is not one of {', '.join(MAX_DIFFERENCE)}")
    if unusable := [fill for fill in plan.fills if not 0 < fill <= 1]:
        raise ConfigError(f"--fills: {unusable[0]} is not a fraction of real tokens, above 0 and at most 1")
    has_cuda = torch.cuda.is_available()
    if plan.longest > plan.token_budget:
        raise ConfigError(
            f"--longest {plan.longest} is over --token-budget {plan.token_budget}; the longest row must fit"
        )
    if plan.device == "cuda" and not has_cuda:
        raise ConfigError("--device: cuda was requested, but torch finds no CUDA device; run with --device cpu")
    return torch.device("cuda" if has_cuda and plan.device != "cpu" else "cpu")


def _machine(plan: Plan, device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "dtype": plan.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "token_budget": plan.token_budget,
        "chunk_tokens": plan.chunk_tokens,
        "peak_memory": "torch's allocator" if device.type == "cuda" else "VmHWM over VmRSS before the pass",
    }
