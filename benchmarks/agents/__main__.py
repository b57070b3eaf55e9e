"""Trajectories of several turns: what the environments' time costs, and what is computed again.

    python -m benchmarks.agents [--json] [--rows N] [--turns T] [--milliseconds M] [--kind transformers|vllm]

N rows take T turns each, of 32 tokens in the mean (geometric). `engine` is the engine alone, for which every answer is
there at once, and `anew` the same with the whole history as each turn's prompt. The others are the kinds of
`environment.admission`, with environments that take M milliseconds to answer, in processes of their own; `journal` is
`steps` with all turns and answers recorded, in the folder for temporary files. The ways take turns after one warm-up;
figures are medians over `--repeats`. On a busy machine, compare the processor time of this process, with `--threads 1`.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.agents.stand_ins import AnewEngine, Immediate
from benchmarks.command import print_table
from benchmarks.train.models import SIZES
from infra.datasets import PromptRow
from infra.engines.base import EngineUsage, RolloutEngine, Sampling
from infra.engines.open import open_engine
from infra.environments.bridge import Dialogue
from infra.environments.episodes import Episodes
from infra.environments.journal import Batch, Journal
from infra.environments.open import environment_class
from infra.environments.pool import EnvironmentPool
from infra.models.load import load_tokenizer
from infra.models.tiny import make_model
from infra.storage.journals import JournalFiles
from infra.storage.runs import RunDirectory
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import ClassEnvironment
from schemas.config.run import RunConfig

WAYS = ("engine", "anew", "wave", "steps", "journal", "arrival")
VOCAB_SIZE = 260
STOP_TOKEN_IDS = tuple(range(0, 256, 32))
NUM_PROMPTS, NUM_ENVIRONMENT_PROCESSES = 8, 2
MAX_RESPONSE_TOKENS = 2000


def main() -> None:
    """Print the table, and with `--json` one last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also print one last line of JSON")
    parser.add_argument("--kind", choices=("transformers", "vllm"), default="transformers", help="the engine")
    parser.add_argument("--model", choices=("tiny", "small", "mid"), default="small")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=16, help="environment.admission_steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder, opened_engine(Path(folder), arguments) as (config, engine):
        figures = measure(config, engine, arguments, Path(folder))
    print_table("", figures, 10, 16)
    if arguments.json:
        print(json.dumps(figures))


@contextmanager
def opened_engine(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[RunConfig, RolloutEngine]]:
    """Start the engine with a model of random weights."""
    sizes = SIZES[arguments.model] | {"vocab_size": VOCAB_SIZE, "head_dim": 32}
    rollout = {"kind": arguments.kind, "max_response_tokens": MAX_RESPONSE_TOKENS}
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": str(make_model(folder / "model", **sizes))},
            "data": {"train_path": "unused.jsonl", "max_prompt_tokens": 64},
            "reward": {"kind": "exact"},
            "rollout": rollout,
        }
    )
    engine = open_engine(config, load_tokenizer(config.model))
    try:
        yield config, engine
    finally:
        engine.close()


def measure(
    config: RunConfig, engine: RolloutEngine, arguments: argparse.Namespace, folder: Path
) -> dict[str, dict[str, float]]:
    """Return the figures of each way; journals are in `folder`."""
    given = {"milliseconds": arguments.milliseconds, "turns": arguments.turns}
    environment = ClassEnvironment(
        path="benchmarks.agents.delayed:Delayed",
        arguments=given,
        max_turns=arguments.turns,
        num_processes=NUM_ENVIRONMENT_PROCESSES,
        admission_steps=arguments.steps,
    )
    pool = EnvironmentPool(environment_class(environment))
    pool.start()
    pool.wait_until_ready()
    chat, limit = ChatTemplate(load_tokenizer(config.model), {}, ()), config.data.max_prompt_tokens
    played: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    try:
        for step in range(arguments.repeats + 1):
            for way in WAYS:
                alone = way in ("engine", "anew")
                admission = "arrival" if alone else "steps" if way == "journal" else way
                episodes = Episodes(
                    [Dialogue(environment.replace(admission=admission), chat, limit)],
                    AnewEngine(engine) if way == "anew" else engine,  # type: ignore[arg-type]
                    Immediate(arguments.turns) if alone else pool,  # type: ignore[arg-type]
                    chat.tokenizer,
                )
                journals = RunDirectory(folder).journals if way == "journal" else None
                played[way].append(play(episodes, engine, chat, arguments.rows, journals, step))
    finally:
        pool.close()
    medians = {way: {name: median(each[name] for each in runs[1:]) for name in runs[0]} for way, runs in played.items()}
    alone_speed = medians["engine"]["tokens/s"]
    return {
        way: {name: round(value, 3) for name, value in (found | {"of engine": found["tokens/s"] / alone_speed}).items()}
        for way, found in medians.items()
    }


def play(
    episodes: Episodes,
    engine: RolloutEngine,
    chat: ChatTemplate,
    num_rows: int,
    journals: JournalFiles | None,
    step: int,
) -> dict[str, float]:
    """Play one trajectory per row, record it as a step's if there are journals, and return the figures."""
    prompts = []
    for number in range(num_rows):
        messages = [{"role": "user", "content": f"Question {number * NUM_PROMPTS // num_rows}"}]
        ids = np.array(chat.encode(messages), dtype=np.int32)
        prompts.append(PromptRow(ids, messages[0]["content"], "", {}, "bench", messages, environment=0))
    batch = Batch(run_id="bench", step=step, batch=0, settings="", groups=(0,))
    rows = [(0, number) for number in range(num_rows)]
    with Journal(journals, batch, rows, VOCAB_SIZE) if journals else nullcontext() as journal:
        begun = episodes.begin(prompts, range(num_rows), journal)
        usage = engine.usage = EngineUsage()
        started, cpu_started = time.perf_counter(), time.process_time()
        sampling = Sampling(MAX_RESPONSE_TOKENS, stop_token_ids=STOP_TOKEN_IDS)
        trajectories = [trajectory for _, trajectory in episodes.play(begun, range(num_rows), sampling)]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    assert all(trajectory.failure is None for trajectory in trajectories), "an environment failed"
    sampled = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
    between = sum(int((~trajectory.loss_mask).sum()) for trajectory in trajectories)
    prefix = {prompt.prompt_ids.tobytes(): len(prompt.prompt_ids) for prompt in begun}
    return {
        "seconds": seconds,
        "cpu seconds": cpu_seconds,
        "tokens/s": sampled / seconds,
        "new tokens": float(sum(prefix.values()) + between),
        "prefilled": float(usage.prefilled),
        "steps": float(usage.num_steps),
    }


if __name__ == "__main__":
    main()
