"""The measurement: a real run of `sluice train` with a tiny model, on a local Prefect server and Ray.

All figures are computed from `metrics.jsonl`, the run's own record. Of two consecutive steps,

    interval = start of the next step - start of the step
    overhead = interval - seconds of the phases in `WORK_PHASES`
    between  = interval - seconds of the step

so every second of a run is counted once: in a work phase, or as overhead. A stall is a step whose overhead exceeds
`STALL_SECONDS`. The run evaluates nothing, and writes a checkpoint after each step, as is the default.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.step.workspace import Workspace
from infra.models.tiny import make_model
from infra.storage.runs import RunDirectory
from schemas.step import StepReport

WORK_PHASES = ("rollout", "logprob", "reference", "update")
STALL_SECONDS = 1.5
RUN_ID = "orchestration"
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        steps: Steps of the run.
        overrides: Further settings of the run, as `sluice train` takes them.
    """

    steps: int = 200
    overrides: tuple[str, ...] = ()


QUICK = Plan(steps=4)


def measure(plan: Plan, workspace: Workspace) -> dict[str, Any]:
    """Run once, and report the overhead of its steps.

    Args:
        plan: The settings.
        workspace: The folder of the run; its services are left running.

    Returns:
        In milliseconds, over all steps but the first and the last: `step_overhead_ms_p50`, its `p95`,
        `between_steps_ms_p50` and `phases_ms_p50`; `slope_ms_per_100_steps`, by which the overhead grows over the run;
        `stalls`; and `first_step_ms`, by phase.
    """
    make_model(workspace.folder / "bench-model", **MODEL, num_key_value_heads=2, max_position_embeddings=512)
    small = ("rollout.num_prompts=2", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=8")
    workspace.train("--run-id", RUN_ID, f"steps={plan.steps}", *small, *plan.overrides)
    steps = RunDirectory(workspace.folder / "runs" / RUN_ID).metrics.steps()
    return {
        **summarize(steps),
        "plan": asdict(plan),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": torch.__version__,
    }


def summarize(steps: Sequence[StepReport]) -> dict[str, Any]:
    """Compute the figures of `measure` from the reports of at least three steps."""
    starts = [step.started_at for step in steps if step.started_at is not None]
    intervals = np.array([later - earlier for earlier, later in pairwise(starts)])
    work = np.array([sum(step.seconds_by_phase.get(name, 0.0) for name in WORK_PHASES) for step in steps[:-1]])
    overhead = 1000 * (intervals - work)
    between = 1000 * (intervals - [step.seconds for step in steps[:-1]])
    later_steps = steps[1:-1]
    return {
        "step_overhead_ms_p50": float(np.median(overhead[1:])),
        "p95": float(np.percentile(overhead[1:], 95)),
        "between_steps_ms_p50": float(np.median(between[1:])),
        "stalls": int((overhead > 1000 * STALL_SECONDS).sum()),
        "slope_ms_per_100_steps": _slope(overhead[1:]) * 100,
        "phases_ms_p50": {
            phase: float(np.median([1000 * step.seconds_by_phase[phase] for step in later_steps]))
            for phase in steps[0].seconds_by_phase
        },
        "first_step_ms": {phase: 1000 * seconds for phase, seconds in steps[0].seconds_by_phase.items()},
        "steps": len(later_steps),
    }


def _slope(values: np.ndarray) -> float:
    """Return the slope of a line through the values, by Theil and Sen: the median of all pairs' slopes."""
    earlier, later = np.triu_indices(len(values), k=1)
    return float(np.median((values[later] - values[earlier]) / (later - earlier))) if len(values) > 1 else 0.0
