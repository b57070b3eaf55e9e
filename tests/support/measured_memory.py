"""Measured peaks of resident memory: a policy rank scores and updates, in a process of its own.

Run as `python -m tests.support.measured_memory`, with `ENVIRONMENT`; prints the peaks of some run configs in JSON.
Resident memory, unlike torch's own counts, includes everything: the kernels' scratch memory as well.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from rl_core.columns.jagged import jagged
from rl_core.planning import plan_forward, plan_step
from rl_core.training import RankRows, ScoringModule, Trainer, score_rows
from schemas.config.run import RunConfig
from tests.support.policies import load_policy

# Every tensor gets pages of its own, which go back to the system as soon as it is freed: the peak is of live tensors.
# And Arrow's own allocator has no thread, with which a process must not be forked.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # resets VmHWM, see proc(5)


def measure(configs: Sequence[RunConfig], sizes: tuple[int, int, int], warm_up: Path) -> list[dict[str, int]]:
    """Measure runs in a new process, one after the other.

    Args:
        configs: The runs.
        sizes: Tokens of each prompt, tokens of each response, and rows of the step.
        warm_up: Folder of a tiny model, with which the process first does all that is measured.

    Returns:
        For each run the peak bytes of the phases "scoring" and "update", above those of the process before it loads
        the model.
    """
    given = json.dumps([config.model_dump_json() for config in configs])
    command = [sys.executable, "-m", "tests.support.measured_memory", given, str(warm_up), *map(str, sizes)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def _measure(configs: Sequence[RunConfig], warm_up: Path, sizes: tuple[int, int, int]) -> list[dict[str, int]]:
    torch.set_num_threads(1)
    # What a process pays for once: imports, kernels and their buffers.
    _peaks(configs[0].replace(model=configs[0].model.replace(path=str(warm_up))), sizes)
    return [_peaks(config, sizes) for config in configs]


def _peaks(config: RunConfig, sizes: tuple[int, int, int]) -> dict[str, int]:
    prompt_tokens, response_tokens, num_rows = sizes
    peaks: dict[str, int] = {}
    base = reset_peak()
    module = ScoringModule(load_policy(config.model), config.packing, config.rollout.temperature)
    trainer, budget = Trainer(module, config), config.packing.token_budget
    _update(trainer, [prompt_tokens], [1], budget)  # gradients and the optimizer's state exist from now on
    prompts, responses = [prompt_tokens] * num_rows, [response_tokens] * num_rows
    forward = plan_forward(prompts, responses, num_ranks=1, token_budget=budget).ranks[0]
    with _peak(peaks, "scoring", base):
        score_rows(module, packed_rows(prompts, responses), forward)
    with _peak(peaks, "update", base):
        _update(trainer, prompts, responses, budget)
    return peaks


def _update(trainer: Trainer, prompts: Sequence[int], responses: Sequence[int], token_budget: int) -> None:
    """Do one update on rows with these lengths."""
    sizes = {"num_updates": 1, "num_ranks": 1, "token_budget": token_budget}
    plan = plan_step(prompts, responses, responses, seed=0, **sizes)
    trainer.update(packed_rows(prompts, responses), plan.updates[0])


@contextmanager
def _peak(peaks: dict[str, int], phase: str, base: int) -> Iterator[None]:
    reset_peak()
    yield
    peaks[phase] = status_bytes("VmHWM") - base


def reset_peak() -> int:
    """Reset the high-water mark, and return the bytes in use now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text(RESET_PEAK)
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """Return an entry of `/proc/self/status` in bytes, such as VmRSS, or VmHWM, its peak."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def packed_rows(prompts: Sequence[int], responses: Sequence[int], *, experts: int = 0, samples: int = 1) -> RankRows:
    """Return rows of random tokens with these lengths, so many with the same prompt, and all columns for an update.

    With router replay, these are of a model with two layers of so many experts, of which two are chosen.
    """
    generator = np.random.default_rng(0)
    total, firsts, of_rows = sum(responses), prompts[::samples], pa.array(np.arange(len(prompts)) // samples)
    logprobs = np.full(total, -9.0, dtype=np.float32)
    columns = {
        "prompt_ids": jagged(generator.integers(0, 256, sum(firsts), dtype=np.int32), firsts).take(of_rows),
        "response_ids": jagged(generator.integers(0, 256, total, dtype=np.int32), responses),
        "loss_mask": jagged(np.ones(total, dtype=bool), responses),
        "sampler_logprobs": jagged(logprobs, responses),
        "reference_logprobs": jagged(logprobs, responses),
        "advantages": pa.array(generator.standard_normal(len(prompts)), pa.float32()),
    }
    behavior = generator.normal(-5.5, 0.2, total)  # about those of a new model with 256 tokens
    columns["behavior_logprobs"] = jagged(behavior.astype(np.float32), responses)
    for name, lengths in {"prompt_experts": firsts, "response_experts": responses}.items() if experts else ():
        chosen = generator.random((2, sum(lengths), experts)).argsort(axis=-1)[:, :, :2].astype(np.uint8)
        rows = jagged(np.concatenate(list(chosen), axis=1), lengths)
        columns[name] = rows.take(of_rows) if lengths is firsts else rows
    return RankRows(np.arange(len(prompts)), pa.record_batch(columns))


if __name__ == "__main__":
    given, folder, *counts = sys.argv[1:]
    prompt, response, rows = map(int, counts)
    runs = [RunConfig.model_validate_json(run) for run in json.loads(given)]
    print(json.dumps(_measure(runs, Path(folder), (prompt, response, rows))))
