"""The wait for a step's rewards after its last response: scored as responses arrive, or all at the end.

    python -m benchmarks.rewards [--json] [--items N] [--seconds S] [--milliseconds M] [--processes P]

N responses arrive evenly over S seconds. A reward waits for M milliseconds, in a plain function (`wait`) or an async
one (`wait_async`); `nothing` returns immediately. The figures are medians over `--repeats`, in which the two ways take
turns, after one warm-up.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from infra.rewards import RewardScorer
from infra.rewards.open import open_reward_scorer
from rl_core.rewards import RewardItem
from schemas.config.reward import FunctionReward

MILLISECONDS = "REWARD_MILLISECONDS"  # environment variable: the milliseconds that a reward waits


def wait(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return a reward after a wait that blocks its process."""
    time.sleep(float(os.environ[MILLISECONDS]) / 1000)
    return 1.0


async def wait_async(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return a reward after a wait that overlaps with other calls."""
    await asyncio.sleep(float(os.environ[MILLISECONDS]) / 1000)
    return 1.0


def nothing(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return a reward immediately, so that only the round trip is measured."""
    return 1.0


def main() -> None:
    """Print the table, and with `--json` one last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also print one last line of JSON")
    parser.add_argument("--items", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    os.environ[MILLISECONDS] = str(arguments.milliseconds)
    print(f"{'seconds after the last arrival':32}{'streamed':>10}{'at the end':>12}")
    figures = {}
    for name in ("wait", "wait_async", "nothing"):
        figures[name] = measure(name, arguments)
        print(f"{name:32}{figures[name]['streamed']:>10.4f}{figures[name]['at_the_end']:>12.4f}")
    if arguments.json:
        print(json.dumps(figures))


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds after the last arrival, by way of scoring."""
    config = FunctionReward(path=f"benchmarks.rewards:{name}", num_processes=arguments.processes)
    ways: dict[str, Callable[[RewardScorer, int, float], float]] = {
        "streamed": score_streamed,
        "at_the_end": score_at_the_end,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    scorer = open_reward_scorer(config)
    try:
        scorer.wait_until_ready()
        for _ in range(arguments.repeats + 1):
            for way, run in ways.items():
                seconds[way].append(run(scorer, arguments.items, arguments.seconds))
    finally:
        scorer.close()
    return {way: round(median(values[1:]), 4) for way, values in seconds.items()}


def score_streamed(scorer: RewardScorer, num_items: int, arrival_seconds: float) -> float:
    """Submit each item when it arrives; return the seconds from the last arrival to all outcomes."""
    started = time.monotonic()
    with scorer.open_batch() as batch:
        for number in range(num_items):
            wait_until(started + arrival_seconds * (number + 1) / num_items)
            batch.add(number, make_item(number))
        last = time.monotonic()
        outcomes = batch.finish()
    assert len(outcomes) == num_items
    return time.monotonic() - last


def score_at_the_end(scorer: RewardScorer, num_items: int, arrival_seconds: float) -> float:
    """Submit all items when the last one has arrived; return the seconds from then to all outcomes."""
    time.sleep(arrival_seconds)
    last = time.monotonic()
    outcomes = scorer.score([make_item(number) for number in range(num_items)])
    assert len(outcomes) == num_items
    return time.monotonic() - last


def make_item(number: int) -> RewardItem:
    """Return a response of realistic length."""
    return RewardItem("a prompt " * 50, f"{number} " * 200, "an answer", {})


def wait_until(moment: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    main()
