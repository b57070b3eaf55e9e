"""The measurement: real runs of `sluice train`, with steps in turn or overlapped, on a local Prefect server and Ray."""

import logging
import os
import platform
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.step.peer import TrlRuns
from benchmarks.step.workload import PATHS, WARM_UP_STEPS, Plan, write_inputs
from benchmarks.step.workspace import Workspace
from infra.storage.runs import RunDirectory
from schemas.errors import ConfigError
from schemas.step import StepReport
from schemas.store import StoreTraffic

logger = logging.getLogger(__name__)


def measure(plan: Plan, workspace: Workspace) -> dict[str, Any]:
    """Run every path in turn, and report the medians over all steps after each run's warm-up.

    Args:
        plan: The settings.
        workspace: The folder of the runs; its services are left running.

    Returns:
        `paths`: by name, `seconds_per_step`, `tokens_per_s`, `seconds_by_phase`, the mean `staleness` of a
        step's rows, and `data_plane`, see `_data_plane`; `speedup`: the seconds of the others over those of
        `overlapped`; `peers`, see `TrlRuns.summary`, and `speedup_over_peers`: a peer's seconds over those of each
        path; the plan, and the machine.

    Raises:
        ConfigError: The plan has a path that there is not, or its peer is not installed.
    """
    if unknown := [name for name in plan.paths if name not in PATHS]:
        raise ConfigError(f"--paths: {unknown[0]!r} is not one of {', '.join(PATHS)}")
    peer = TrlRuns(plan, plan.threads or os.cpu_count() or 1) if plan.peer == "trl" else None
    common = write_inputs(workspace, plan)
    reports: dict[str, list[StepReport]] = {name: [] for name in plan.paths}
    first_steps: dict[str, list[StepReport]] = {name: [] for name in plan.paths}
    for repetition in range(plan.repetitions):
        for name in plan.paths:
            run_id = f"{name}-{repetition}"
            workspace.train("--run-id", run_id, *common, f"runtime.num_threads={plan.threads}", *PATHS[name])
            all_steps = RunDirectory(workspace.folder / "runs" / run_id).metrics.steps()
            steps = all_steps[WARM_UP_STEPS:]
            logger.info("%s: %.2f s per step", run_id, median(step.seconds for step in steps))
            reports[name] += steps
            first_steps[name].append(all_steps[0])
        if peer is not None:
            peer.run(workspace, repetition)
    paths = {
        name: {**_summary(steps), "data_plane": _data_plane(steps, first_steps[name])}
        for name, steps in reports.items()
    }
    seconds = {name: path["seconds_per_step"] for name, path in paths.items()}
    peers = {} if peer is None else {"trl": peer.summary()}
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


def _summary(steps: list[StepReport]) -> dict[str, Any]:
    phases = sorted({phase for step in steps for phase in step.seconds_by_phase})
    return {
        "seconds_per_step": median(step.seconds for step in steps),
        "tokens_per_s": median(step.metrics["tokens"] / step.seconds for step in steps),
        "response_tokens": fmean(step.metrics["response/tokens"] for step in steps),
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
        in the first steps; and, of the rollout workers' puts alone, `rollout_put_bytes`, `rollout_put_ms`,
        `first_rollout_put_ms` and `max_rollout_put_ms`, of which the last is the mean of the slowest step.
    """
    traffic = [sum(step.traffic_by_stage.values(), StoreTraffic()) for step in steps]
    shares = [(each.put_seconds + each.read_seconds) / step.seconds for each, step in zip(traffic, steps, strict=True)]
    total = sum(traffic, StoreTraffic())
    first = sum((each for step in first_steps for each in step.traffic_by_stage.values()), StoreTraffic())
    return {
        "share": median(shares),
        "max_share": max(shares),
        "put_ms": _put_ms(total),
        "put_bytes": total.put_bytes / total.num_puts,
        "first_put_ms": _put_ms(first),
        **_rollout_puts(steps, first_steps),
    }


def _rollout_puts(steps: list[StepReport], first_steps: list[StepReport]) -> dict[str, float]:
    later, first = ([step.traffic_by_stage["put"] for step in each] for each in (steps, first_steps))
    total = sum(later, StoreTraffic())
    return {
        "rollout_put_bytes": total.put_bytes / total.num_puts,
        "rollout_put_ms": _put_ms(total),
        "first_rollout_put_ms": _put_ms(sum(first, StoreTraffic())),
        "max_rollout_put_ms": max(map(_put_ms, later)),
    }


def _put_ms(traffic: StoreTraffic) -> float:
    return 1e3 * traffic.put_seconds / traffic.num_puts
