"""The measurement: the stages of `flows.step`, without Prefect's engine, against fake workers.

What runs is the product's own code: the stages themselves, the look-up of the workers, dispatch to the pool and the
group, `ray.put` of what all ranks get, the store's client and its index (an actor in a process of its own, over Arrow
Flight; no chunk but the advantages is written), the ledger's entries as Prefect's result store writes them, the plan's
file, the line in `metrics.jsonl`. `benchmarks.driver.workers` says what a call costs. Prefect's own work doesn't depend
on the scale; `sluice bench orchestration` measures it.

The time of a part is the driver's, without what the fake workers do in this process: `cpu_seconds`, of all threads of
the driver, and `wall_seconds`, which includes waiting for the index. `driver_seconds` is the processor time of all
parts: on a machine with other work, wall-clock time says little.
"""

import asyncio
import os
import resource
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from prefect.filesystems import LocalFileSystem
from prefect.logging import disable_run_logger
from prefect.results import ResultStore

from benchmarks.driver.meter import Meter
from benchmarks.driver.workers import INCARNATION, Workers
from infra.processes.collection import rare_collections
from infra.storage.runs import RunDirectory
from infra.stores.open import open_store, start_store
from infra.stores.shared.client import SharedColumnStore
from infra.stores.shared.flight import FlightClient
from infra.stores.steps import archive_step, open_step
from rl_core.rollout.lengths import count_lengths
from rl_core.views import with_groups
from schemas.base import Frozen
from schemas.config.run import RunConfig
from schemas.metrics import merge_metrics, values
from schemas.step import PolicyHandle, RunHandle, StepReport
from tasks.advantage import compute_step_advantages
from tasks.logprob import score_behavior
from tasks.operations import publish_weights
from tasks.put import put_columns
from tasks.rollout import generate_rollouts
from tasks.stage import HandleSerializer
from tasks.update import update_policy

RUN_ID = "driver"
SAMPLES_PER_PROMPT = 8
RANKS_PER_ROLLOUT_WORKER = 4


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    ranks: int = 1024
    rows: int = 10**6
    steps: int = 3


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run some steps against fake workers; this process must be connected to a Ray of its own.

    Returns:
        `driver_seconds`, `wall_seconds` and `parts` of the step of the median `driver_seconds`, with
        its `calls` and the bytes of their arguments; `peak_bytes`, the largest resident memory of this process.
    """
    config = _config(plan, folder)
    directory = RunDirectory.create(config, RUN_ID)
    store, _ = start_store(directory, config)
    assert isinstance(store, SharedColumnStore)
    run = RunHandle(
        run_id=RUN_ID,
        identity=RUN_ID,
        directory=str(directory.path),
        config=config,
        store_incarnation=store.incarnation,
    )
    workers = Workers(run, FlightClient(store.endpoint), store.endpoint.location)
    get_actor = ray.get_actor

    def find(name: str, namespace: str | None = None) -> Any:
        return workers.find(name) or get_actor(name, namespace)

    # Tasks run outside of a flow here, where Prefect has no logger for their warnings of failed rewards.
    with patch.object(ray, "get_actor", find), rare_collections(), disable_run_logger():
        steps = [asyncio.run(_run_step(run, workers, step)) for step in range(plan.steps)]
    store.close()
    median = statistics.median_low([step["driver_seconds"] for step in steps])
    return {
        **next(step for step in steps if step["driver_seconds"] == median),
        **asdict(plan),
        "rows": config.rollout.num_prompts * SAMPLES_PER_PROMPT,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds_by_step": [step["driver_seconds"] for step in steps],
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


async def _run_step(run: RunHandle, workers: Workers, step: int) -> dict[str, Any]:
    """Run one step as `flows.step` does; return its figures."""
    workers.meter, workers.num_calls, workers.argument_bytes = Meter(), 0, 0
    part, directory = workers.meter.part, RunDirectory.of(run)
    policy = PolicyHandle(run_id=run.run_id, version=step, incarnation=INCARNATION)
    results = ResultStore(
        result_storage=LocalFileSystem(basepath=directory.ledger.place), serializer=HandleSerializer()
    )

    async def commit(stage: str, result: Frozen) -> None:
        with part("ledger"):
            await results.awrite(result, key=f"step-{step:06d}/{stage}")

    with part("open"):
        open_step(run, policy)
    with part("rollout"):
        rollout = await generate_rollouts.fn(run, policy)
    await commit("rollout", rollout)
    with part("put"):
        stored = await put_columns.fn(run, policy, rollout)
    await commit("put", stored)
    with part("score"):
        scored = await score_behavior.fn(run, policy, stored.batch)
        batch = with_groups(stored.batch, [scored.group])
    await commit("logprob", scored)
    with part("advantage"):
        advantage = await compute_step_advantages.fn(run, policy, batch, rollout, None)
    await commit("advantage", advantage)
    with part("update"):
        update = await update_policy.fn(run, policy, advantage)
    await commit("update", update)
    with part("publish"):
        await publish_weights.fn(run, update.policy)
    with part("metrics"):
        report = StepReport(
            step=step,
            policy_version=update.policy.version,
            metrics=values(merge_metrics([rollout.metrics, advantage.metrics, update.metrics])),
            seconds=1.0,
            seconds_by_phase={},
            store=open_store(run).usage(),
            plan=advantage.plan.digest,
            response_lengths=count_lengths(rollout.response_lengths),
        )
        directory.metrics.append_step(report)
    with part("clear"):
        archive_step(run, step)
    return workers.meter.figures() | {"calls": workers.num_calls, "argument_bytes": workers.argument_bytes}


def _config(plan: Plan, folder: Path) -> RunConfig:
    rollout = {
        "num_prompts": plan.rows // SAMPLES_PER_PROMPT,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "max_response_tokens": 4096,
        "num_workers": max(1, plan.ranks // RANKS_PER_ROLLOUT_WORKER),
        "batch_prompts": 64,
    }
    return RunConfig.model_validate(
        {
            "steps": plan.steps,
            "model": {"path": "none"},
            "data": {"train_path": "none"},
            "reward": {"kind": "exact"},
            "rollout": rollout,
            "packing": {"token_budget": 16_384},
            "loss": {"behavior": "recompute"},  # with the stage `logprob`
            "store": {"kind": "shared"},
            "runtime": {"num_policy_ranks": plan.ranks, "runs_dir": str(folder)},
        }
    )
