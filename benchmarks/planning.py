"""Step planning: imbalance of the ranks, number of micro-batches, and planning time.

    python -m benchmarks.planning [--json] [--seeds N] [--repeats N]

The first table has, for each distribution of lengths, over all seeds:
- the largest imbalance, (max - min) / mean of the ranks' cost: with the rows in the given order (identity), assigned
  by longest processing time first (lpt) alone, and as planned (plan);
- more_micros: the plan's micro-batches per rank beyond the minimum that the total number of tokens needs, mean;
- lockstep: if all ranks wait for the costliest k-th micro-batch, the sum of these costs over the mean cost of a rank,
  mean: of the plan, and of its ranks packed by first fit, longest row first, and run fullest bin first.
The second table has the times of large steps. They are wall-clock; on a machine with other work, compare the minima.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.command import print_table
from rl_core.planning import imbalance, plan_forward, plan_step
from rl_core.planning.balance import rank_costs, row_costs
from schemas.plan import ForwardPlan

SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {  # lengths in tokens, int64 [n]
    "lognormal": lambda random, n: np.clip(random.lognormal(6, 1, n), 16, 8192).astype(np.int64),
    "truncated": lambda random, n: np.clip(random.lognormal(7.5, 1, n), 16, 4096).astype(np.int64),
    "uniform": lambda random, n: random.integers(16, 8193, n),
    "bimodal": lambda random, n: random.integers(100, 400, n) + 6000 * (random.random(n) < 0.2),
}
SIZES = ((512, 16), (8192, 16), (512, 64))  # rows, ranks
LARGE = ((100_000, 64, 1), (100_000, 64, 16), (100_000, 1, 1))  # rows, ranks, updates
TOKEN_BUDGET = 16_384


def main() -> None:
    """Print the tables, and with `--json` one last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also print one last line of JSON")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    quality = {
        f"{shape} {n} / {ranks}": measure_quality(shape, n, ranks, arguments.seeds)
        for n, ranks in SIZES
        for shape in SHAPES
    }
    print_table("shape, rows / ranks", quality, 24, 18)
    times = {
        f"{n} / {ranks} / {updates}": measure_times(n, ranks, updates, arguments.repeats) for n, ranks, updates in LARGE
    }
    print_table("rows / ranks / updates", times, 24, 18)
    if arguments.json:
        print(json.dumps({"seeds": arguments.seeds, "token_budget": TOKEN_BUDGET, "quality": quality, "times": times}))


def measure_quality(shape: str, num_rows: int, num_ranks: int, num_seeds: int) -> dict[str, float]:
    """Return the first table's figures for one shape and size; imbalances in percent."""
    figures = []
    for seed in range(num_seeds):
        lengths = SHAPES[shape](np.random.default_rng(seed), num_rows)
        costs = row_costs(lengths)
        plan = plan_forward(np.ones_like(lengths), lengths - 1, num_ranks=num_ranks, token_budget=TOKEN_BUDGET)
        ranks = [[row for micro in rank for row in micro.rows] for rank in plan.ranks]
        figures.append(
            (
                cost_imbalance(costs, [rows.tolist() for rows in np.array_split(np.arange(num_rows), num_ranks)]),
                cost_imbalance(costs, longest_first(costs, num_ranks)),
                plan.imbalance,
                plan.num_micros - -(-lengths.sum() // (num_ranks * TOKEN_BUDGET)),
                lockstep_ratio(costs, micro_rows(plan)),
                lockstep_ratio(costs, [first_fit(rows, lengths) for rows in ranks]),
            )
        )
    columns = np.array(figures)
    worst, mean = 100 * columns[:, :3].max(axis=0), columns[:, 3:].mean(axis=0)
    names = ("identity_%", "lpt_%", "plan_%", "more_micros", "lockstep", "lockstep_first_fit")
    return {name: round(float(value), 4) for name, value in zip(names, (*worst, *mean), strict=True)}


def measure_times(num_rows: int, num_ranks: int, num_updates: int, repeats: int) -> dict[str, float]:
    """Return the minimum seconds to plan a step, to dump and load its JSON, and to hash it."""
    lengths = SHAPES["lognormal"](np.random.default_rng(0), num_rows)
    options = {"num_updates": num_updates, "num_ranks": num_ranks, "token_budget": TOKEN_BUDGET, "seed": 0}
    ones = np.ones_like(lengths)
    plan = plan_step(ones, lengths - 1, lengths - 1, **options)
    text = plan.model_dump_json()
    return {
        "plan_s": min_seconds(lambda: plan_step(ones, lengths - 1, lengths - 1, **options), repeats),
        "dump_s": min_seconds(plan.model_dump_json, repeats),
        "load_s": min_seconds(lambda: type(plan).model_validate_json(text), repeats),
        "hash_s": min_seconds(lambda: hash(plan), repeats),
        "json_bytes_per_row": round(len(text) / num_rows, 2),
        "imbalance_%": round(100 * max(update.imbalance for update in plan.updates), 4),
    }


def longest_first(costs: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Assign rows to ranks, costliest first, each to the rank with the least work so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    work = np.zeros(num_ranks)
    for row in np.argsort(-costs, kind="stable").tolist():
        rank = int(work.argmin())
        ranks[rank].append(row)
        work[rank] += costs[row]
    return ranks


def first_fit(rows: Sequence[int], lengths: np.ndarray) -> list[list[int]]:
    """Pack rows, longest first, each into the first bin that has space; return the fullest bin first."""
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        first = next((index for index, free in enumerate(free_tokens) if free >= lengths[row]), len(bins))
        if first == len(bins):
            bins.append([])
            free_tokens.append(TOKEN_BUDGET)
        bins[first].append(row)
        free_tokens[first] -= int(lengths[row])
    return [bins[index] for index in np.argsort(free_tokens, kind="stable")]


def micro_rows(plan: ForwardPlan) -> list[list[list[int]]]:
    """Return the rows of every rank's micro-batches."""
    return [[list(micro.rows) for micro in rank] for rank in plan.ranks]


def cost_imbalance(costs: np.ndarray, ranks: Sequence[Sequence[int]]) -> float:
    """Return (max - min) / mean of the ranks' cost."""
    return imbalance(rank_costs(costs, [np.array(rows, dtype=np.int64) for rows in ranks]))


def lockstep_ratio(costs: np.ndarray, ranks: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the sum over k of the cost of the costliest k-th micro-batch, over the mean cost of a rank."""
    num_micros = max(map(len, ranks))
    work = np.zeros((len(ranks), num_micros))
    for rank, micros in enumerate(ranks):
        work[rank, : len(micros)] = [costs[list(rows)].sum() if rows else 0.0 for rows in micros]
    return float(work.max(axis=0).sum() / work.sum(axis=1).mean())


def min_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the minimum wall-clock seconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(min(seconds), 4)


if __name__ == "__main__":
    main()
