"""The measurement: real runs of `sluice train`, with steps in turn or overlapped, on a local Prefect server and Ray.

All figures are computed from `metrics.jsonl`, the run's own record. Of two consecutive steps,

    interval = start of the next step - start of the step
    overhead = interval - seconds of the phases in `WORK_PHASES`

so every second of a run is counted once: in a work phase, or as overhead.
"""

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from rich.console import Group

from benchmarks.busy import busy_processes
from benchmarks.command import Benchmark, Report, choose, require_steps, table, temporary_place
from benchmarks.step.peer import TrlRuns
from benchmarks.step.workload import PATHS, QUICK, WARM_UP_STEPS, Plan, write_inputs
from benchmarks.step.workspace import Workspace
from infra.storage.runs import RunDirectory
from schemas.batch import StoreTraffic
from schemas.step import StepReport

logger = logging.getLogger(__name__)

WORK_PHASES = ("rollout", "logprob", "reference", "update")


def measure(plan: Plan) -> Report:
    """Measure in a folder with services of its own."""
    with busy_processes(plan.beside), temporary_place(Workspace) as workspace:
        return measure_in(workspace, plan)


def measure_in(workspace: Workspace, plan: Plan) -> Report:
    """Run every path in turn, and report the medians over all steps after each run's warm-up.

    Args:
        workspace: The folder of the runs; its services are left running.
        plan: The settings.

    Returns:
        `paths`: by name, the figures of `summarize`; `speedup`: the seconds of the others over those of `overlapped`;
        `peers`, see `TrlRuns.summary`, and `speedup_over_peers`: a peer's seconds over those of each path; the plan,
        and the machine.

    Raises:
        ConfigError: The plan has a path that there is not, no step after the warm-up, or its peer is not installed.
    """
    choose("paths", plan.paths, PATHS)
    require_steps(plan.steps, WARM_UP_STEPS)
    peer = TrlRuns(plan, plan.threads or os.cpu_count() or 1) if plan.peer else None
    common = write_inputs(workspace, plan)
    runs: dict[str, list[Sequence[StepReport]]] = {name: [] for name in plan.paths}
    for repetition in range(plan.repetitions):
        for name in plan.paths:
            run_id = f"{name}-{repetition}"
            workspace.train("--run-id", run_id, *common, f"runtime.num_threads={plan.threads}", *PATHS[name])
            runs[name].append(RunDirectory(workspace.folder / "runs" / run_id).metrics.steps())
            logger.info("%s: %.2f s per step", run_id, median(step.seconds for step in runs[name][-1][WARM_UP_STEPS:]))
        if peer is not None:
            peer.run(workspace, repetition)
    paths = {name: summarize(steps) for name, steps in runs.items()}
    seconds = {name: path["seconds_per_step"] for name, path in paths.items()}
    peers = {} if peer is None else {plan.peer: peer.summary()}
    return {
        "paths": paths,
        "speedup": {name: own / seconds["overlapped"] for name, own in seconds.items() if "overlapped" in seconds},
        "peers": peers,
        "speedup_over_peers": {
            name: {path: each["seconds_per_step"] / own for path, own in seconds.items()}
            for name, each in peers.items()
        },
        "plan": asdict(plan),
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
    }


def summarize(runs: Sequence[Sequence[StepReport]]) -> dict[str, Any]:
    """Compute the figures of a path from the steps of its runs after their warm-up.

    Returns:
        Medians: `seconds_per_step`, `tokens_per_s`, `seconds_by_phase`, `overhead_seconds`, its 95th percentile
        `overhead_p95`, and `store_share`, the puts and reads of all processes over a step's seconds; means:
        `response_tokens`, `staleness` of a step's rows, and `put_ms` of a put; and the number of `steps`.
    """
    steps = [step for run in runs for step in run[WARM_UP_STEPS:]]
    phases = sorted({phase for step in steps for phase in step.seconds_by_phase})
    overhead = [seconds for run in runs for seconds in _overhead(run[WARM_UP_STEPS:])]
    traffic = [sum(step.traffic_by_stage.values(), StoreTraffic()) for step in steps]
    total = sum(traffic, StoreTraffic())
    return {
        "seconds_per_step": median(step.seconds for step in steps),
        "tokens_per_s": median(step.metrics["tokens"] / step.seconds for step in steps),
        "response_tokens": fmean(step.metrics["response/tokens"] for step in steps),
        "overhead_seconds": median(overhead),
        "overhead_p95": float(np.percentile(overhead, 95)),
        "seconds_by_phase": {
            phase: median(step.seconds_by_phase.get(phase, 0.0) for step in steps) for phase in phases
        },
        "staleness": fmean(step.metrics["rollout/staleness"] for step in steps),
        "store_share": median(
            (each.put_seconds + each.read_seconds) / step.seconds for each, step in zip(traffic, steps, strict=True)
        ),
        "put_ms": 1e3 * total.put_seconds / total.num_puts,
        "steps": len(steps),
    }


def _overhead(steps: Sequence[StepReport]) -> list[float]:
    """Return the seconds from each step's start to the next one's that no work phase took."""
    return [
        (later.started_at or 0.0)
        - (step.started_at or 0.0)
        - sum(step.seconds_by_phase.get(name, 0.0) for name in WORK_PHASES)
        for step, later in pairwise(steps)
    ]


def render(report: Report) -> Group:
    """Return the report as a table and text."""
    rows = {
        name: {
            "s/step": path["seconds_per_step"],
            "tok/s": path["tokens_per_s"],
            "overhead": path["overhead_seconds"],
            "store": f"{path['store_share']:.1%}",
            **path["seconds_by_phase"],
        }
        for name, path in report["paths"].items()
    }
    speedup = {name: value for name, value in report["speedup"].items() if name != "overlapped"}
    notes = [f"overlapped is {value:.2f} times as fast as {name}" for name, value in speedup.items()]
    for name, peer in report["peers"].items():
        notes.append(
            f"{name} {peer['version']}: {peer['seconds_per_step']:.2f} s/step (generation "
            f"{peer['generate_seconds']:.2f}, the rest {peer['other_seconds']:.2f}; {peer['rows_per_forward']} rows "
            "per forward, the fastest)"
        )
        for path, value in report["speedup_over_peers"][name].items():
            notes.append(f"{path} is {value:.2f} times as fast as {name}")
    return table("whole GRPO steps: medians, in seconds", rows, notes)


BENCHMARK = Benchmark(Plan(), QUICK, measure, render)
