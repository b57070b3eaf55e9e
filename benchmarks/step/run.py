"""Whole GRPO steps, one after another or overlapped: real runs of the command, on a local Prefect server and Ray."""

import logging
import os
import platform
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.step.workspace import Workspace
from benchmarks.train.models import size_of
from infra.models.tiny import make_model
from infra.storage.runs import RunDirectory
from schemas.step import StepReport

logger = logging.getLogger(__name__)

FIRST_STOP_TOKEN = 300  # after the tokenizer's own; no text comes of these
WARM_UP_STEPS = 2  # the first of a run, which also begin to overlap

# What differs between the paths; threads are a share of the machine's cores, per worker.
PATHS: dict[str, tuple[int, float]] = {
    "synchronous": (0, 1.0),
    "synchronous_half": (0, 0.5),  # each worker has the cores that it has when the two overlap
    "overlapped": (1, 0.5),
}


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        model: One of the sizes of `benchmarks/train`.
        num_prompts: Per step.
        samples_per_prompt: Responses to each.
        tokens: The most of one response; random stop tokens end one after about a quarter of it.
        steps: Of each run.
        repetitions: Runs of each path, in turn.
        cores: That the paths share; 0 for the machine's.
        paths: Some of `PATHS`.
    """

    model: str = "small"
    num_prompts: int = 8
    samples_per_prompt: int = 8
    tokens: int = 192
    steps: int = 8
    repetitions: int = 3
    cores: int = 0
    paths: tuple[str, ...] = tuple(PATHS)


QUICK = Plan(model="tiny", num_prompts=2, samples_per_prompt=2, tokens=8, steps=4, repetitions=1)


def measure(plan: Plan, workspace: Workspace) -> dict[str, Any]:
    """Run every path in turn, and report the medians over all steps but each run's first.

    Args:
        plan: What is measured.
        workspace: Where; its services go on.

    Returns:
        `paths`: by name, `seconds_per_step`, `tokens_per_s`, `seconds_by_phase`, `threads` and the mean `staleness`
        of a step's rows; `speedup`: the seconds of the others over those of `overlapped`; the plan, and the machine.
    """
    cores = plan.cores or os.cpu_count() or 1
    threads = {name: max(1, round(cores * PATHS[name][1])) for name in plan.paths}
    common = _write_inputs(workspace, plan)
    reports: dict[str, list[StepReport]] = {name: [] for name in plan.paths}
    for repetition in range(plan.repetitions):
        for name in plan.paths:
            run_id = f"{name}-{repetition}"
            varied = (f"runtime.max_staleness={PATHS[name][0]}", f"runtime.num_threads={threads[name]}")
            workspace.train("--run-id", run_id, *common, *varied)
            steps = RunDirectory(workspace.folder / "runs" / run_id).metrics.steps()[WARM_UP_STEPS:]
            logger.info("%s: %.2f s per step", run_id, median(step.seconds for step in steps))
            reports[name] += steps
    paths = {name: {"threads": threads[name], **_summary(steps)} for name, steps in reports.items()}
    seconds = {name: path["seconds_per_step"] for name, path in paths.items()}
    return {
        "paths": paths,
        "speedup": {name: own / seconds["overlapped"] for name, own in seconds.items() if "overlapped" in seconds},
        "plan": asdict(plan) | {"cores": cores},
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
    }


def _write_inputs(workspace: Workspace, plan: Plan) -> list[str]:
    """Write the model; return the overrides that all runs share."""
    size = {**size_of(plan.model), "vocab_size": max(size_of(plan.model)["vocab_size"], 1024)}
    make_model(workspace.folder / "bench-model", max_position_embeddings=4096, initializer_range=0.02, **size)
    num_stop_tokens = min(round(size["vocab_size"] * 4 / plan.tokens), 512)  # nearly uniform: one token in tokens / 4
    return [
        f"steps={plan.steps}",
        "model.path=bench-model",
        f"rollout.num_prompts={plan.num_prompts}",
        f"rollout.samples_per_prompt={plan.samples_per_prompt}",
        f"rollout.max_response_tokens={plan.tokens}",
        f"rollout.stop_token_ids={[FIRST_STOP_TOKEN + index for index in range(num_stop_tokens)]}",
        'correction.kind="truncated"',  # all of them, so that all do the same work
        "optim.lr=1e-6",
    ]


def _summary(steps: list[StepReport]) -> dict[str, Any]:
    phases = sorted({phase for step in steps for phase in step.seconds_by_phase})
    return {
        "seconds_per_step": median(step.seconds for step in steps),
        "tokens_per_s": median(step.metrics["tokens"] / step.seconds for step in steps),
        "seconds_by_phase": {
            phase: median(step.seconds_by_phase.get(phase, 0.0) for step in steps) for phase in phases
        },
        "staleness": sum(step.metrics["rollout/staleness"] for step in steps) / len(steps),
        "steps": len(steps),
    }
