"""Rollout workers as plain objects, on a store in memory."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.stores.chunk_index import MemoryStore
from infra.workers.rollout import RolloutWorker
from rl_core.rollout.evaluation import split_prompts, summarize
from rl_core.views import new_batch
from schemas.rollout import PutResult, RolloutShard
from schemas.step import EvalReport, RunHandle
from tasks.put import prompt_rows
from tests.support.configs import merge, run_config
from tests.support.tiny import make_tiny_data, make_tiny_model

NUM_PROMPTS, NUM_SAMPLES = 5, 3
GROUPS = range(NUM_PROMPTS)  # of a step's own prompts

REWARDS = """
def parts(prompt, completion, answer, info):
    return {"reward": len(completion) / 10, "index": info["index"]}

def fails_for_some(prompt, completion, answer, info):
    if int(answer) % 2:
        raise RuntimeError(f"no reward for {prompt}")
    return 1.0

def fails(prompt, completion, answer, info):
    raise RuntimeError("no reward at all")

def hangs_for_one(prompt, completion, answer, info):
    while int(answer) == 1:
        pass
    return {"reward": 1.0, "length": len(completion)}

def of_turns(prompt, completion, answer, info):
    return {"reward": info["environment_reward"], "turns": len(info["turns"])}

def of_group(prompt, completions, answer, info):
    totals = [sample["environment_reward"] for sample in info["samples"]]
    return [{"reward": total - sum(totals) / len(totals), "samples": len(totals)} for total in totals]

def is_even(prompt, completion, answer, info):
    return 1.0 - int(answer) % 2
"""


def make_folder(folder: Path) -> Path:
    """Write a model, 7 training prompts, 4 held-out ones and the rewards, and return the folder."""
    make_tiny_model(folder / "model")
    make_tiny_data(folder / "train.parquet", 7)
    make_tiny_data(folder / "eval.parquet", 4)
    (folder / "rollout_rewards.py").write_text(REWARDS)
    return folder


def run_of(folder: Path, *, reward: str = "parts", limits: dict | None = None, **overrides: object) -> RunHandle:
    """Return a run that scores with a function of `REWARDS`, by default in this process and without a time limit."""
    fields = {
        "data": {"eval_path": str(folder / "eval.parquet")},
        "reward": {
            "kind": "function",
            "path": f"rollout_rewards:{reward}",
            "max_failure_fraction": 0.7,
            **(limits or {"num_processes": 0, "timeout_seconds": None}),
        },
        "rollout": {"num_prompts": NUM_PROMPTS, "samples_per_prompt": NUM_SAMPLES, "max_response_tokens": 8},
    }
    config = run_config(folder, **merge(fields, overrides))
    directory = tempfile.mkdtemp(prefix="run-", dir=folder)  # its own: a journal of the same run would be used
    return RunHandle(run_id="run", identity="run", directory=directory, config=config, store_incarnation="memory")


def worker_of(run: RunHandle, shard: int = 0, store: MemoryStore | None = None) -> RolloutWorker:
    worker = RolloutWorker(run, shard, store or open_store())
    worker.start()
    return worker


def evaluate(run: RunHandle, worker: RolloutWorker | None = None) -> EvalReport:
    """Evaluate version 0 with one worker, by default one of its own; the report's time is 0."""
    worker = worker or worker_of(run)
    batches = split_prompts(run.config.eval, worker.num_held_out())
    return summarize(run.config, 0, [worker.evaluate(0, rows) for rows in batches.values()], seconds=0.0)


def open_store() -> MemoryStore:
    store = MemoryStore("run", 2**20)
    for step in range(3):
        store.open(step)
    return store


def read(store: MemoryStore, shard: RolloutShard, result: PutResult, step: int = 0) -> pa.RecordBatch:
    batch = new_batch(
        run_id="run",
        step=step,
        policy_version=0,
        chunks=[result.chunk],
        dtypes=result.dtypes,
        prompt_lengths=np.array(shard.prompt_lengths),
        response_lengths=np.array(shard.response_lengths),
        prompt_rows=prompt_rows([result]),
    )
    return store.read(batch, batch.columns)


def put(worker: RolloutWorker, shard: RolloutShard, step: int = 0, parts: tuple[str, ...] | None = None) -> PutResult:
    parts = tuple(shard.parts) if parts is None else parts
    result = worker.put(step, worker.engine.version, shard.shard, shard.kept, parts, shard.worker)
    assert result is not None
    return result


def rows_of(store: MemoryStore, worker: RolloutWorker, shard: RolloutShard, step: int = 0) -> dict[str, dict]:
    """Put a shard, and return its stored rows by sample."""
    stored = read(store, shard, put(worker, shard, step), step)
    return {row["sample_id"]: row for row in stored.to_pylist()}


def play(run: RunHandle) -> tuple[RolloutShard, dict[str, dict]]:
    """Have a new worker generate step 0; return its report, and its rows by sample."""
    store = open_store()
    worker = worker_of(run, store=store)
    try:
        shard = worker.generate(0, 0, 0, GROUPS)
        return shard, rows_of(store, worker, shard)
    finally:
        worker.close()


def assert_same_rows(found: dict[str, dict], expected: dict[str, dict]) -> None:
    """Assert that rows are equal, up to the last bits of the log-probs: they depend on the batch."""
    assert found.keys() == expected.keys()
    for sample_id, row in expected.items():
        logprobs = found[sample_id].pop("sampler_logprobs")
        assert logprobs == pytest.approx(row.pop("sampler_logprobs"), abs=1e-5)
        assert found[sample_id] == row
