"""Selections from a batch of a million rows: their time, and the size of their handles.

    python -m benchmarks.views [--json] [--rows N] [--repeats N]

Times are wall-clock milliseconds; on a machine with other work, compare the minima.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from rl_core.views import concat, filter_rows, new_batch, permute, prune, read_plan, select, split, with_column
from schemas.batch import BatchHandle, ChunkRef

NUM_CHUNKS = 8
COLUMNS = ("behavior_logprobs", "reference_logprobs")


def main() -> None:
    """Print the table, and with `--json` one last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also print one last line of JSON")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    report = measure(arguments.rows, arguments.repeats)
    for name, value in report.items():
        print(f"{name:32}", "  ".join(f"{key} {part:.2f}" for key, part in value.items()))
    if arguments.json:
        print(json.dumps({"num_rows": arguments.rows, "repeats": arguments.repeats, **report}))


def measure(num_rows: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each operation on a batch of `num_rows` rows, and its handles' JSON bytes per row."""
    random = np.random.default_rng(0)
    whole = make_batch(num_rows, random)
    order, keep = random.permutation(num_rows), random.random(num_rows) < 0.5
    shuffled = permute(whole, order)
    groups = shuffled
    for name in COLUMNS:
        groups = with_column(groups, {name: "float"}, make_chunks(num_rows, name), random.permutation(num_rows))
    sizes = [len(part) for part in np.array_split(order, 64)]
    parts = split(shuffled, sizes)
    pruned = select(whole, np.arange(num_rows // NUM_CHUNKS))
    text = shuffled.model_dump_json()
    operations: dict[str, Callable[[], object]] = {
        "permute": lambda: permute(whole, order),
        "permute_shuffled_3_groups": lambda: permute(groups, order),
        "select_half": lambda: select(shuffled, order[: num_rows // 2]),
        "filter_half": lambda: filter_rows(shuffled, keep),
        "split_64": lambda: split(shuffled, sizes),
        "concat_64": lambda: concat(parts),
        "prune": lambda: prune(pruned),
        "read_plan": lambda: read_plan(shuffled.groups[0]),
        "dump_json": shuffled.model_dump_json,
        "load_json": lambda: BatchHandle.model_validate_json(text),
    }
    handles = {"json_whole": whole, "json_permuted": shuffled, "json_permuted_3_groups": groups}
    return {**{name: timed(call, repeats) for name, call in operations.items()}, **bytes_per_row(handles)}


def make_batch(num_rows: int, random: np.random.Generator) -> BatchHandle:
    """Return all rows of a step, in order: prompts of 32 to 256 tokens, lognormal responses of up to 2048."""
    prompts = random.integers(32, 257, num_rows)
    responses = np.clip(random.lognormal(6, 0.8, num_rows), 1, 2048).astype(np.int64)
    return new_batch("run", 1, 0, make_chunks(num_rows, "rollout"), {"response_ids": "uint16"}, prompts, responses)


def make_chunks(num_rows: int, stage: str) -> list[ChunkRef]:
    """Return references to chunks with `num_rows` rows in total."""
    bounds = np.linspace(0, num_rows, NUM_CHUNKS + 1).astype(int)
    return [
        ChunkRef(key=f"run/1/{stage}/{shard}/0", num_rows=int(size), num_bytes=64, incarnation="g")
        for shard, size in enumerate(np.diff(bounds))
    ]


def timed(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return the minimum and median milliseconds of a call, after one warm-up call."""
    call()
    milliseconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {"min_ms": round(min(milliseconds), 3), "median_ms": round(statistics.median(milliseconds), 3)}


def bytes_per_row(handles: Mapping[str, BatchHandle]) -> dict[str, dict[str, float]]:
    """Return the length of each handle's JSON per row."""
    return {
        name: {"bytes_per_row": round(len(handle.model_dump_json()) / handle.num_rows, 3)}
        for name, handle in handles.items()
    }


if __name__ == "__main__":
    main()
