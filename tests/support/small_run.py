"""A small run's directory, written by hand: columns of real shapes, without Ray, a model or a trained step.

Each step has six samples, three of each of two prompts, from two rollout workers. One reward failed, so that five rows
are trained on. Numbers are exact in binary: sums over them can be worked out by hand.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from rl_core.columns.jagged import jagged
from rl_core.columns.prompts import rows_of_prompts, share_prompts
from rl_core.views import new_batch, select, with_column
from schemas.batch import BatchHandle, ChunkKey
from tests.support.configs import run_config

END = 256  # the token after all bytes
PROMPTS = ("Spell cat backward.", "Spell bird backward.")
ANSWERS = ("tac", "drib")

# group, response, finish_reason, reward, reward_letters
SAMPLES = (
    (0, "tac", "stop", 1.0, 1.0),
    (0, "ta", "stop", 0.5, 0.5),
    (0, "t\x1b[31mc", "stop", None, None),
    (1, "drib", "stop", 1.0, 1.0),
    (1, "dri", "stop", 0.5, 0.75),
    (1, "dribdribdrib", "length", 0.0, None),
)
NUM_SHARDS, ROWS_PER_SHARD = 2, 3
TRAINED = (0, 1, 3, 4, 5)
ADVANTAGES = (0.25, -0.25, 0.5, 0.0, -0.5)  # of the trained rows
LOGPROBS = tuple(-(row + 1) / 8 for row in range(len(SAMPLES)))  # of each of a row's tokens

DTYPES = {
    "prompt_ids": "uint16",
    **dict.fromkeys(("prompt_text", "answer"), "string"),
    "response_ids": "uint16",
    "loss_mask": "bool",
    "sampler_logprobs": "float",
    "reward": "float",
    "reward_letters": "float",
    **dict.fromkeys(("response_text", "finish_reason"), "string"),
    "group_id": "int32",
    "policy_version": "int32",
}


def make_small_run(folder: Path = Path(), run_id: str = "demo", **store: object) -> RunDirectory:
    """Write a run with two finished steps, 2 and 3, to `folder/runs`; `store` are its store's settings."""
    config = run_config(folder, store={"keep_steps": 2, **store})
    directory = RunDirectory.create(config, run_id)
    if config.store.is_durable:
        for step in (2, 3):
            finish_step(columns_of(directory), step)
    return directory


def columns_of(directory: RunDirectory) -> FsspecColumnStore:
    """The run's durable columns, as a worker has them."""
    return FsspecColumnStore(directory.run_id, str(directory.columns))


def finish_step(store: FsspecColumnStore, step: int) -> BatchHandle:
    """Put all columns of a step, note its batch, and archive it."""
    store.open(step)
    trained = put_advantages(store, put_behavior(store, put_rollout(store, step)))
    store.save_batch(trained)
    store.archive(step)
    return trained


def put_rollout(store: FsspecColumnStore, step: int) -> BatchHandle:
    """Put both workers' rows of an open step; the batch is not noted."""
    shards = [share_prompts(rollout_columns(step, at)) for at in range(NUM_SHARDS)]
    chunks = [store.put(_key(store, step, "rollout", at), rows) for at, rows in enumerate(shards)]
    prompts, responses = ([len(row) for row in column.to_pylist()] for column in _tokens(SAMPLES))
    held = rows_of_prompts(pa.chunked_array([rows["prompt_ids"] for rows in shards]).combine_chunks())
    return new_batch(store.run_id, step, step, chunks, DTYPES, prompts, responses, held)


def put_behavior(store: FsspecColumnStore, batch: BatchHandle) -> BatchHandle:
    """Add `behavior_logprobs`, a quarter below the sampler's; the worker put the rows in reverse order."""
    order = list(reversed(range(len(SAMPLES))))
    columns = pa.record_batch({"behavior_logprobs": _logprobs([(row, SAMPLES[row]) for row in order], -0.25)})
    chunk = store.put(_key(store, batch.step, "behavior"), columns, select(batch, order))
    return with_column(batch, {"behavior_logprobs": "float"}, [chunk], order)


def replace_advantages(run: RunDirectory, step: int, values: Sequence[float]) -> None:
    """Put a step again, with other advantages of the trained rows."""
    store = columns_of(run)
    store.clear(step)
    store.open(step)
    store.save_batch(put_advantages(store, put_behavior(store, put_rollout(store, step)), values))


def put_advantages(store: FsspecColumnStore, batch: BatchHandle, values: Sequence[float] = ADVANTAGES) -> BatchHandle:
    """Select the rows whose reward did not fail, and add `advantages`."""
    rows = select(batch, TRAINED)
    columns = pa.record_batch({"advantages": pa.array(values, type=pa.float32())})
    chunk = store.put(_key(store, batch.step, "advantage"), columns, rows)
    return with_column(rows, {"advantages": "float"}, [chunk], range(len(TRAINED)))


def rollout_columns(step: int, shard: int) -> pa.RecordBatch:
    """One worker's rows, with the columns of `DTYPES`."""
    first = shard * ROWS_PER_SHARD
    samples = SAMPLES[first : first + ROWS_PER_SHARD]
    groups, responses, reasons, rewards, parts = zip(*samples, strict=True)
    prompt_ids, response_ids = _tokens(samples)
    lengths = np.array([len(row) for row in response_ids.to_pylist()])
    arrays = {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "loss_mask": jagged(np.ones(lengths.sum(), dtype=bool), lengths),
        "sampler_logprobs": _logprobs(list(enumerate(samples, first))),
        "reward": pa.array(rewards, type=pa.float32()),
        "reward_letters": pa.array(parts, type=pa.float32()),
        "prompt_text": pa.array([PROMPTS[group] for group in groups]),
        "response_text": pa.array(responses),
        "answer": pa.array([ANSWERS[group] for group in groups]),
        "finish_reason": pa.array(reasons),
        "group_id": pa.array(groups, type=pa.int32()),
        "policy_version": pa.array([step] * len(samples), type=pa.int32()),
        "info": pa.array(['{"data_source": "words"}'] * len(samples)),
    }
    return pa.record_batch({name: arrays[name] for name in DTYPES})


def _key(store: FsspecColumnStore, step: int, stage: str, shard: int = 0) -> ChunkKey:
    return ChunkKey(run_id=store.run_id, step=step, stage=stage, shard=shard)


def _tokens(samples) -> tuple[pa.LargeListArray, pa.LargeListArray]:  # type: ignore[no-untyped-def]
    """The bytes of prompts and responses; a response that stopped has an end."""
    prompts = [list(PROMPTS[group].encode()) for group, *_ in samples]
    responses = [[*text.encode(), *([END] if reason == "stop" else [])] for _, text, reason, *_ in samples]
    return _uint16(prompts), _uint16(responses)


def _uint16(rows: list[list[int]]) -> pa.LargeListArray:
    return jagged([np.array(row, dtype=np.uint16) for row in rows])


def _logprobs(samples, shift: float = 0.0) -> pa.LargeListArray:  # type: ignore[no-untyped-def]
    """Every token's log-prob, by its row's number."""
    lengths = [len(row) for row in _tokens([sample for _, sample in samples])[1].to_pylist()]
    values = np.array([LOGPROBS[row] + shift for row, _ in samples], dtype=np.float32)
    return jagged(np.repeat(values, lengths), np.array(lengths))
