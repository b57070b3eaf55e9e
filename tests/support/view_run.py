"""Runs whose kept steps have all that `sluice view` shows: turns, versions, a reference, and texts that attack a page.

Written by hand, with a tokenizer that is made from their texts; nothing is trained.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from rl_core.columns.jagged import jagged
from rl_core.columns.prompts import rows_of_prompts, share_prompts
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from schemas.step import StepReport
from tests.support.configs import run_config

ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
PROMPTS = (f"Look up the capital of France.\n\tUse the tool. {ATTACK}", "What is 17 * 23?\nShow your work.")
TURNS = (  # of each sample: the model's turns, each with the answer of its environment
    (("<tool>capital(France)</tool>", "\nresult: Paris\n"), ("The capital is   Paris.\n\n", "")),
    (("<tool>capital(Fr", "\nerror: no such tool\n"), ("I don't know: \u202eParis\u200b 🗼 ", "")),
    (("17 * 23 = 17 * 20 + 17 * 3\n       = 340 + 51\n       = 391", ""),),
    ((f"391 {ATTACK}" + "x" * 300, ""),),
)
BRANCH = 3  # the second turn of the second row
GROUP = 2  # samples of a prompt
END = "<|end|>"
DTYPES = {
    **dict.fromkeys(("prompt_ids", "response_ids"), "uint16"),
    "loss_mask": "bool",
    **dict.fromkeys(("sampler_logprobs", "behavior_logprobs", "reference_logprobs"), "float"),
    "sampler_versions": "int32",
    **dict.fromkeys(("turn_tokens", "turn_bridge_tokens", "turn_parents"), "int32"),
    **dict.fromkeys(("turn_rewards", "turn_advantages"), "float"),
    **dict.fromkeys(("reward", "reward_format", "advantages"), "float"),
    **dict.fromkeys(("group_id", "policy_version"), "int32"),
    **dict.fromkeys(("prompt_text", "response_text", "answer", "finish_reason", "episode_end"), "string"),
}


def make_view_run(folder: Path, run_id: str = "demo", steps: int = 4, seed: int = 0) -> RunDirectory:
    """Write a run to `folder/runs`, whose model is in `folder/model`, with four rows in each of its steps."""
    tokenizer = make_tokenizer(folder / "model")
    run = RunDirectory.create(run_config(folder, steps=steps, store={"keep_steps": "all"}), run_id)
    store = FsspecColumnStore(run_id, run.columns)
    for step in range(steps):
        write_step(run, store, tokenizer, step, seed)
    return run


def write_step(run: RunDirectory, store: FsspecColumnStore, tokenizer: Tokenizer, step: int, seed: int = 0) -> None:
    """Put the columns of a step, and report it as finished."""
    random = np.random.default_rng([seed, step])
    columns = _columns(tokenizer, step, random, seed)
    lengths = [[len(row) for row in columns[name].to_pylist()] for name in ("prompt_ids", "response_ids")]
    store.open(step)
    shared = share_prompts(columns)
    ref = store.put(ChunkKey(run_id=run.run_id, step=step, stage="rollout"), shared)
    store.save_batch(new_batch(run.run_id, step, step, [ref], DTYPES, *lengths, rows_of_prompts(shared["prompt_ids"])))
    store.archive(step)
    metrics = {"reward": 0.2 + step / 10, "kl": float(random.random()) / 100}
    metrics |= {"response/tokens": 30.0 + step, "tokens": 150.0}
    report = StepReport(step=step, policy_version=step + 1, metrics=metrics, seconds=2.0, seconds_by_phase={})
    run.metrics.append_step(report)


def _columns(tokenizer: Tokenizer, step: int, random: np.random.Generator, seed: int) -> pa.RecordBatch:
    samples = [[*turns[:-1], (turns[-1][0] + "!" * (seed * row), turns[-1][1])] for row, turns in enumerate(TURNS)]
    pieces = [[(_ids(tokenizer, said), _ids(tokenizer, answer)) for said, answer in turns] for turns in samples]
    ids = [np.concatenate([part for turn in turns for part in turn]).astype(np.uint16) for turns in pieces]
    mask = [np.concatenate([np.repeat([True, False], [len(a), len(b)]) for a, b in turns]) for turns in pieces]
    prompts = [_ids(tokenizer, PROMPTS[row // GROUP]).astype(np.uint16) for row in range(len(samples))]
    lengths, turns = np.array([len(row) for row in ids]), np.array([len(row) for row in samples])
    count, num_turns = int(lengths.sum()), int(turns.sum())
    sampler = -random.exponential(size=count).astype(np.float32)
    behavior = sampler + random.normal(scale=0.05, size=count).astype(np.float32)
    behavior[3] = -np.inf
    ends = [np.cumsum([len(part) for turn in row for part in turn])[::2] for row in pieces]
    parents = [end - 1 for row in ends for end in (0, *row[:-1])]
    parents[BRANCH] = -1  # it begins another answer to the prompt
    floats = random.normal(size=(4, max(num_turns, len(ids)))).astype(np.float32)
    arrays = {
        "prompt_ids": jagged(prompts),
        "response_ids": jagged(ids),
        "loss_mask": jagged(np.concatenate(mask), lengths),
        "sampler_logprobs": jagged(sampler, lengths),
        "behavior_logprobs": jagged(behavior, lengths),
        "reference_logprobs": jagged(sampler - random.exponential(size=count).astype(np.float32) / 8, lengths),
        "sampler_versions": jagged(np.sort(random.integers(step, step + 3, count)).astype(np.int32), lengths),
        "turn_tokens": jagged(np.array([len(a) for row in pieces for a, _ in row], np.int32), turns),
        "turn_bridge_tokens": jagged(np.array([len(b) for row in pieces for _, b in row], np.int32), turns),
        "turn_parents": jagged(np.array(parents, np.int32), turns),
        "turn_rewards": jagged(floats[0, :num_turns], turns),
        "turn_advantages": jagged(floats[1, :num_turns], turns),
        "reward": pa.array([1.0, 0.0, 0.75, 0.25], pa.float32()),
        "reward_format": pa.array([1.0, None, 0.5, 0.0], pa.float32()),
        "advantages": pa.array([0.5, -0.5, 0.25, -0.25], pa.float32()),
        "group_id": pa.array([row // GROUP for row in range(len(ids))], pa.int32()),
        "policy_version": pa.array([step] * len(ids), pa.int32()),
        "prompt_text": pa.array([PROMPTS[row // GROUP] for row in range(len(ids))]),
        "response_text": pa.array(["".join(said + answer for said, answer in row) for row in samples]),
        "answer": pa.array(["Paris", ATTACK, "391", "391"]),
        "finish_reason": pa.array(["stop", "length", "stop", "stop"]),
        "episode_end": pa.array(["environment", "turn_length", "environment", "environment"]),
    }
    return pa.record_batch({name: arrays[name] for name in DTYPES})


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text).ids, dtype=np.int64)


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write a byte-level BPE tokenizer that has merges of the runs' texts."""
    file = folder / "tokenizer.json"
    if not file.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        texts = [*PROMPTS, *(text for turns in TURNS for turn in turns for text in turn)]
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[AddedToken(END)])
        tokenizer.train_from_iterator(texts, trainer)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(file))
    return Tokenizer.from_file(str(file))
