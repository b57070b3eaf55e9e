"""The measurement: real runs of `sluice train`, with steps in turn or overlapped, on a local Prefect server and Ray."""

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
from schemas.store import StoreTraffic

logger = logging.getLogger(__name__)

FIRST_STOP_TOKEN = 300  # after the tokenizer's own tokens; decodes to nothing
WARM_UP_STEPS = 2  # a run's first steps, during which the overlap starts

# The paths' max_staleness, and threads per worker as a fraction of the cores.
PATHS: dict[str, tuple[int, float]] = {
    "synchronous": (0, 1.0),
    "synchronous_half": (0, 0.5),  # each worker has as many threads as when overlapped
    "overlapped": (1, 0.5),
}


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        model: One of the sizes of `benchmarks/train`.
        num_prompts: Prompts per step.
        samples_per_prompt: Responses per prompt.
        tokens: Maximum tokens per response; random stop tokens end one after about a quarter of them.
        steps: Steps per run.
        repetitions: Runs per path; the paths take turns.
        cores: Cores that the workers share; 0 for all of the machine's.
        paths: A selection of `PATHS`.
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
    """Run every path in turn, and report the medians over all steps after each run's warm-up.

    Args:
        plan: The settings.
        workspace: The folder of the runs; its services are left running.

    Returns:
        `paths`: by name, `seconds_per_step`, `tokens_per_s`, `seconds_by_phase`, `threads`, the mean `staleness` of a
        step's rows, and `data_plane`, see `_data_plane`; `speedup`: the seconds of the others over those of
        `overlapped`; the plan, and the machine.
    """
    cores = plan.cores or os.cpu_count() or 1
    threads = {name: max(1, round(cores * PATHS[name][1])) for name in plan.paths}
    common = _write_inputs(workspace, plan)
    reports: dict[str, list[StepReport]] = {name: [] for name in plan.paths}
    first_steps: dict[str, list[StepReport]] = {name: [] for name in plan.paths}
    for repetition in range(plan.repetitions):
        for name in plan.paths:
            run_id = f"{name}-{repetition}"
            varied = (f"runtime.max_staleness={PATHS[name][0]}", f"runtime.num_threads={threads[name]}")
            workspace.train("--run-id", run_id, *common, *varied)
            all_steps = RunDirectory(workspace.folder / "runs" / run_id).metrics.steps()
            steps = all_steps[WARM_UP_STEPS:]
            logger.info("%s: %.2f s per step", run_id, median(step.seconds for step in steps))
            reports[name] += steps
            first_steps[name].append(all_steps[0])
    paths = {
        name: {"threads": threads[name], **_summary(steps), "data_plane": _data_plane(steps, first_steps[name])}
        for name, steps in reports.items()
    }
    seconds = {name: path["seconds_per_step"] for name, path in paths.items()}
    return {
        "paths": paths,
        "speedup": {name: own / seconds["overlapped"] for name, own in seconds.items() if "overlapped" in seconds},
        "plan": asdict(plan) | {"cores": cores},
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
    }


def _write_inputs(workspace: Workspace, plan: Plan) -> list[str]:
    """Write the model, and return the overrides that all runs share."""
    size = {**size_of(plan.model), "vocab_size": max(size_of(plan.model)["vocab_size"], 1024)}
    make_model(workspace.folder / "bench-model", max_position_embeddings=4096, initializer_range=0.02, **size)
    # Sampling is nearly uniform: about one in tokens / 4 of the tokens stops a response.
    num_stop_tokens = min(round(size["vocab_size"] * 4 / plan.tokens), 512)
    return [
        f"steps={plan.steps}",
        "model.path=bench-model",
        f"rollout.num_prompts={plan.num_prompts}",
        f"rollout.samples_per_prompt={plan.samples_per_prompt}",
        f"rollout.max_response_tokens={plan.tokens}",
        f"rollout.stop_token_ids={[FIRST_STOP_TOKEN + index for index in range(num_stop_tokens)]}",
        'correction.kind="truncated"',  # on every path, so that all do the same work
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


def _data_plane(steps: list[StepReport], first_steps: list[StepReport]) -> dict[str, float]:
    """Return what the column store took of the steps: all processes' puts and reads together, over a step's seconds.

    Args:
        steps: The steps after each run's warm-up.
        first_steps: The first step of each run.

    Returns:
        `share`, the median; `max_share`; `put_ms` and `put_bytes`, the mean of a put; `first_put_ms`, the mean of a put
        in the first steps.
    """
    traffic = [sum(step.traffic_by_stage.values(), StoreTraffic()) for step in steps]
    shares = [(each.put_seconds + each.read_seconds) / step.seconds for each, step in zip(traffic, steps, strict=True)]
    total = sum(traffic, StoreTraffic())
    first = sum((each for step in first_steps for each in step.traffic_by_stage.values()), StoreTraffic())
    return {
        "share": median(shares),
        "max_share": max(shares),
        "put_ms": 1e3 * total.put_seconds / total.num_puts,
        "put_bytes": total.put_bytes / total.num_puts,
        "first_put_ms": 1e3 * first.put_seconds / first.num_puts,
    }
