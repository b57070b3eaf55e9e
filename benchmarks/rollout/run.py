"""The measurement: every case with each engine in turn."""

import logging
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.command import Benchmark, Report, choose, option, table
from benchmarks.models import size_of
from benchmarks.rollout.paths import PATHS, Response, RolloutPath, plain_logprobs
from benchmarks.rollout.workload import EQUAL, VARIED, Workload, make_workload
from infra.engines.open import engine_versions
from infra.models.load import load_model
from infra.models.tiny import make_model
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError, PipelineError

logger = logging.getLogger(__name__)
transformers_logging.set_verbosity_error()

BASELINE = "generate"
COMPARED_RESPONSES = 4  # of each path, with a plain forward
MAX_DIFFERENCE = 1e-3  # nats from a plain forward, for any one token
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    models: tuple[str, ...] = option(("tiny", "small", "mid"), "comma-separated: tiny, small, mid")
    prompts: int = option(8, "prompts per batch")
    samples: int = option(8, "samples per prompt")
    prompt_tokens: int = option(64, "tokens of a prompt, in the mean")
    tokens: int = option(128, "maximum tokens per response")
    repetitions: int = option(5, "repetitions per path; medians are reported")
    threads: int = option(0, "torch threads; 0 for all cores")
    paths: tuple[str, ...] = option(tuple(PATHS), f"comma-separated: {', '.join(PATHS)}")
    rollout_python: str = option("", "the interpreter with vLLM, for its path")


QUICK = Plan(
    models=("tiny",), prompts=2, samples=2, prompt_tokens=8, tokens=16, repetitions=1, paths=("sluice", "generate")
)


@dataclass
class Meter:
    """The measurements of one path."""

    path: RolloutPath
    rates: list[float] = field(default_factory=list)  # response tokens per second
    lengths: list[int] = field(default_factory=list)
    max_difference: float = 0.0  # nats


def measure(plan: Plan) -> Report:
    """Measure all cases: responses of equal and of varied lengths.

    Raises:
        ConfigError: The plan can't be run.
        PipelineError: A path's responses or log-probs are wrong.
    """
    choose("paths", plan.paths, PATHS)
    sizes = {name: size_of(name) for name in plan.models}
    vllm = engine_versions(VllmRollout(python=plan.rollout_python or None))
    torch.set_num_threads(plan.threads or os.cpu_count() or 1)
    cases: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), **size, max_position_embeddings=4096)
            measured, unavailable = _measure_model(plan, Path(folder), size["vocab_size"])
        cases.extend({"model": name, **case} for case in measured)
        skipped.extend({"model": name, **entry} for entry in unavailable)
    return {"plan": asdict(plan), "machine": _machine(vllm), "cases": cases, "skipped": skipped}


def _measure_model(plan: Plan, folder: Path, vocab_size: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the model's cases, and the paths that can't run it."""
    workloads = {
        case: make_workload(case, vocab_size, plan.prompts, plan.samples, plan.prompt_tokens, plan.tokens)
        for case in (EQUAL, VARIED)
    }
    longest = max(len(prompt) for workload in workloads.values() for prompt in workload.prompts) + plan.tokens
    reference = load_model(ModelConfig(path=str(folder)))
    cases, skipped = [], []
    paths: list[RolloutPath] = []
    try:
        for name in plan.paths:
            try:
                paths.append(PATHS[name](folder, longest, plan.prompts * plan.samples, plan.rollout_python or None))
            except ConfigError as error:
                skipped.append({"path": name, "reason": str(error)})
                logger.warning("skipped %s: %s", name, error)
        for case, workload in workloads.items():
            cases.extend({"case": case, **figures} for figures in _measure_case(plan, paths, workload, reference))
    finally:
        for path in paths:
            path.close()
    return cases, skipped


def _measure_case(
    plan: Plan, paths: Sequence[RolloutPath], workload: Workload, reference: PreTrainedModel
) -> list[dict[str, Any]]:
    meters = [Meter(path) for path in paths]
    for meter in meters:  # also warms up
        responses, _ = meter.path.measure(workload, 0)
        meter.max_difference = _check(meter.path.name, workload, responses, reference)
    for repetition in range(1, plan.repetitions + 1):
        for meter in meters:
            responses, seconds = meter.path.measure(workload, repetition)
            meter.lengths.extend(len(response.token_ids) for response in responses)
            meter.rates.append(sum(len(response.token_ids) for response in responses) / seconds)
            logger.info("%s: %.0f tokens/s", meter.path.name, meter.rates[-1])
    speeds = {meter.path.name: statistics.median(meter.rates) for meter in meters}
    return [_figures(meter, workload, speeds) for meter in meters]


def _figures(meter: Meter, workload: Workload, speeds: dict[str, float]) -> dict[str, Any]:
    speed = speeds[meter.path.name]
    return {
        "path": meter.path.name,
        "tokens_per_s": speed,
        "ratio_to_generate": speed / speeds[BASELINE] if BASELINE in speeds else None,
        "slowest_tokens_per_s": min(meter.rates),
        "fastest_tokens_per_s": max(meter.rates),
        "repetitions": len(meter.rates),
        "rows": workload.num_rows,
        "mean_response_tokens": statistics.mean(meter.lengths),
        "max_response_tokens": max(meter.lengths),
        "logprobs": meter.path.logprobs,
        "max_difference": meter.max_difference,
    }


def _check(name: str, workload: Workload, responses: list[Response], reference: PreTrainedModel) -> float:
    """Check a path's responses; return the largest difference of its log-probs from a plain forward's, in nats."""
    if len(responses) != workload.num_rows:
        raise PipelineError(f"{name}: {len(responses)} responses, expected {workload.num_rows}; not timed")
    for response in responses:
        is_stop = np.isin(response.token_ids, workload.stop_token_ids)
        ended = len(response.token_ids) == workload.max_response_tokens or bool(is_stop[-1])
        if is_stop[:-1].any() or not ended or len(response.logprobs) != len(response.token_ids):
            raise PipelineError(
                f"{name}: a response of {len(response.token_ids)} tokens and {len(response.logprobs)} log-probs "
                "doesn't end where it should; not timed"
            )
    rows = np.linspace(0, workload.num_rows - 1, COMPARED_RESPONSES).astype(int)
    difference = max(
        float(np.abs(plain_logprobs(reference, prompt, response.token_ids) - response.logprobs).max())
        for prompt, response in ((workload.prompts[row // workload.num_samples], responses[row]) for row in rows)
    )
    if not difference <= MAX_DIFFERENCE:
        raise PipelineError(f"{name}: log-probs differ by {difference:.3g} nats from a plain forward; not timed")
    return difference


def _machine(vllm: Mapping[str, str]) -> dict[str, Any]:
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],  # after the run, including the benchmark's own
        "dtype": "float32",
        "versions": {name: versions[name] for name in PACKAGES} | dict(vllm),
    }


def render(report: Report) -> Group:
    """Return the report as a table and text."""
    rows = {
        f"{case['model']}, {case['case']}: {case['path']}": {
            "tok/s": case["tokens_per_s"],
            "slowest": case["slowest_tokens_per_s"],
            "fastest": case["fastest_tokens_per_s"],
            "x generate": case["ratio_to_generate"],
            "mean length": case["mean_response_tokens"],
        }
        for case in report["cases"]
    }
    difference = max(case["max_difference"] for case in report["cases"])
    notes = [
        f"log-probs differ from a plain forward's by at most {difference:.1e} nats",
        *(f"{entry['model']}: {entry['path']} was skipped: {entry['reason']}" for entry in report["skipped"]),
    ]
    return table("response tokens per second, log-probs included, and the speedup over generate", rows, notes)


BENCHMARK = Benchmark(Plan(), QUICK, measure, render)
