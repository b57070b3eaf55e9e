"""How even plans are, how many micro-batches they need, and how long planning takes.

    python -m benchmarks.planning [--json] [--seeds N] [--repeats N]

The first table says for each shape of lengths, over all seeds:
- spread: (max - min) / mean of the ranks' cost, the largest: of the rows in the order given, of longest processing
  time first (LPT) alone, and of the plan;
- micro-batches of each rank beyond what the tokens of all ranks need at the least, on average: of the plan;
- lockstep: the costs of each rank's k-th micro-batch wait for the largest of them, so the sum of these over the mean
  cost of a rank, on average: of the plan, and of its ranks packed by first fit, longest first, and run fullest first.
The second table says how long large steps take. Times are wall-clock; on a machine with other work, compare the minima.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np

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
    """Print the tables, or with `--json` also one last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    quality = {
        f"{shape} {n} / {ranks}": measure_quality(shape, n, ranks, arguments.seeds)
        for n, ranks in SIZES
        for shape in SHAPES
    }
    print_table("shape, rows / ranks", quality)
    times = {
        f"{n} / {ranks} / {updates}": measure_times(n, ranks, updates, arguments.repeats) for n, ranks, updates in LARGE
    }
    print_table("rows / ranks / updates", times)
    if arguments.json:
        print(json.dumps({"seeds": arguments.seeds, "token_budget": TOKEN_BUDGET, "quality": quality, "times": times}))


def measure_quality(shape: str, num_rows: int, num_ranks: int, num_seeds: int) -> dict[str, float]:
    """What the first table says of one shape and size; spreads in percent."""
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
    """Seconds of planning a step, of its JSON both ways and of its hash, each the least of all repeats."""
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
    """Costliest row first, each to the rank with the least work so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    work = np.zeros(num_ranks)
    for row in np.argsort(-costs, kind="stable").tolist():
        rank = int(work.argmin())
        ranks[rank].append(row)
        work[rank] += costs[row]
    return ranks


def first_fit(rows: Sequence[int], lengths: np.ndarray) -> list[list[int]]:
    """Longest row first, each into the first bin with enough free tokens; the fullest bin first."""
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        at = next((at for at, left in enumerate(free_tokens) if left >= lengths[row]), len(bins))
        if at == len(bins):
            bins.append([])
            free_tokens.append(TOKEN_BUDGET)
        bins[at].append(row)
        free_tokens[at] -= int(lengths[row])
    return [bins[at] for at in np.argsort(free_tokens, kind="stable")]


def micro_rows(plan: ForwardPlan) -> list[list[list[int]]]:
    """The rows of every rank's micro-batches."""
    return [[list(micro.rows) for micro in rank] for rank in plan.ranks]


def cost_imbalance(costs: np.ndarray, ranks: Sequence[Sequence[int]]) -> float:
    """(max - min) / mean of the ranks' cost."""
    return imbalance(rank_costs(costs, [np.array(rows, dtype=np.int64) for rows in ranks]))


def lockstep_ratio(costs: np.ndarray, ranks: Sequence[Sequence[Sequence[int]]]) -> float:
    """The sum over k of the costliest rank's k-th micro-batch, over the mean cost of a rank."""
    num_micros = max(map(len, ranks))
    work = np.zeros((len(ranks), num_micros))
    for rank, micros in enumerate(ranks):
        work[rank, : len(micros)] = [costs[list(rows)].sum() if rows else 0.0 for rows in micros]
    return float(work.max(axis=0).sum() / work.sum(axis=1).mean())


def min_seconds(call: Callable[[], object], repeats: int) -> float:
    """The least wall-clock seconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(min(seconds), 4)


def print_table(title: str, lines: dict[str, dict[str, float]]) -> None:
    """Print one line for each entry, its figures in columns."""
    names = next(iter(lines.values()))
    print(f"{title:24}", *(f"{name:>18}" for name in names))
    for label, figures in lines.items():
        print(f"{label:24}", *(f"{value:>18}" for value in figures.values()))


if __name__ == "__main__":
    main()
