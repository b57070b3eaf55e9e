"""Runs of a sharded policy, and made-up rows for their steps."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from infra.storage.runs import RunDirectory
from infra.stores.open import open_store
from infra.workers.launch import kill_workers
from rl_core.columns.jagged import jagged
from rl_core.planning import plan_step
from rl_core.views import decode_ints, new_batch, with_column
from schemas.batch import BatchHandle, ChunkKey
from schemas.plan import StepPlan
from schemas.step import RunHandle
from tests.support.configs import run_config

NUM_ROWS = 12
TOKENS = {"prompt_ids": "uint16", "response_ids": "uint16", "loss_mask": "bool", "sampler_logprobs": "float"}


class Runs:
    """Runs in one folder, whose workers are killed at the end of the module."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, []

    def make(self, run_id: str, num_ranks: int, num_steps: int) -> RunHandle:
        config = run_config(
            self._folder,
            steps=num_steps,
            rollout={"max_response_tokens": 9},
            optim={"lr": 1e-3, "updates_per_step": 2},
            packing={"token_budget": 24},
            store={"kind": "fsspec"},
            runtime={"num_policy_ranks": num_ranks},
        )
        path = self._folder / "runs" / run_id
        directory = RunDirectory(path) if path.exists() else RunDirectory.create(config, run_id)
        run = RunHandle(
            run_id=run_id, identity=run_id, directory=str(directory.path), config=config, store_incarnation="g"
        )
        self._made.append(run)
        return run

    def kill_workers(self) -> None:
        for run in self._made:
            kill_workers(run.identity, run.config)


def put_rows(run: RunHandle, step: int) -> BatchHandle:
    """Put made-up rows of one step, the same for every run."""
    generator = np.random.default_rng(step)
    prompts, responses = generator.integers(1, 5, NUM_ROWS), generator.integers(1, 9, NUM_ROWS)
    store = open_store(run)
    store.open(step)
    columns = pa.record_batch(
        {
            "prompt_ids": jagged(generator.integers(0, 90, prompts.sum()).astype(np.uint16), prompts),
            "response_ids": jagged(generator.integers(0, 90, responses.sum()).astype(np.uint16), responses),
            "loss_mask": jagged(np.ones(responses.sum(), dtype=bool), responses),
            "sampler_logprobs": jagged(-generator.random(responses.sum()).astype(np.float32), responses),
        }
    )
    chunk = store.put(ChunkKey(run_id=run.run_id, step=step, stage="rollout"), columns)
    return new_batch(run.run_id, step, step, [chunk], TOKENS, prompts, responses)


def plan_of(run: RunHandle, batch: BatchHandle) -> StepPlan:
    prompts, responses = decode_ints(batch.prompt_lengths), decode_ints(batch.response_lengths)
    return plan_step(
        prompts,
        responses,
        responses,
        num_updates=2,
        num_ranks=run.config.runtime.num_policy_ranks,
        token_budget=run.config.packing.token_budget,
        seed=batch.step,
    )


def with_advantages(run: RunHandle, batch: BatchHandle, poisoned: int | None = None) -> BatchHandle:
    values = np.random.default_rng(100 + batch.step).standard_normal(NUM_ROWS).astype(np.float32)
    if poisoned is not None:
        values[poisoned] = np.nan
    key = ChunkKey(run_id=run.run_id, step=batch.step, stage="advantage")
    chunk = open_store(run).put(key, pa.record_batch({"advantages": pa.array(values)}), batch)
    return with_column(batch, {"advantages": "float"}, [chunk], range(NUM_ROWS))
