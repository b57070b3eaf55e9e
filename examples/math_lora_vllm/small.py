"""Make the small run's files in `.sluice/small`: `small.py WARM_START_STEPS`.

The problems are additions worded as in GSM8K. The warm start shows the model how to solve them; half of its solutions
lack the last line, "#### " and the number, without which the reward is 0. That is what GRPO then improves.
"""

import random
import sys
from pathlib import Path

from convert import convert, write_rows

from infra.workers.warmstart import WarmstartWorker
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig
from schemas.config.warmstart import WarmstartConfig

FOLDER = Path(".sluice/small")
NAMES = ("Ann", "Ben", "Eva", "Tom", "Mia", "Sam")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")
VERBS = ("buys", "finds", "gets", "picks")


def problem(rng: random.Random, marked_fraction: float = 1.0) -> dict[str, str]:
    """Return a problem with the keys of GSM8K's files."""
    first, second = rng.randint(1, 9), rng.randint(1, 9)
    name, things, verb = rng.choice(NAMES), rng.choice(THINGS), rng.choice(VERBS)
    question = f"{name} has {first} {things} and {verb} {second} more. How many {things} does {name} have now?"
    solution = f"{first} + {second} = {first + second}"
    marked = rng.random() < marked_fraction
    return {"question": question, "answer": f"{solution}\n#### {first + second}" if marked else solution}


def write_problems() -> None:
    """Write training and held-out problems, and the solutions of the warm start."""
    rng = random.Random(0)
    heldout = [problem(rng) for _ in range(64)]
    seen = {row["question"] for row in heldout}
    train = [row for row in (problem(rng) for _ in range(4000)) if row["question"] not in seen]
    solved = [row for row in (problem(rng, 0.5) for _ in range(10000)) if row["question"] not in seen]
    write_rows(FOLDER / "heldout.jsonl", convert(heldout, instruction=""))
    write_rows(FOLDER / "train.jsonl", convert(train, instruction=""))
    solutions = convert(solved, instruction="")
    for row, shown in zip(solutions, solved, strict=True):
        row["reward_model"]["ground_truth"] = shown["answer"]  # what the warm start learns to write
    write_rows(FOLDER / "solutions.jsonl", solutions)


def warm_start(num_steps: int) -> None:
    """Train the random model on the solutions, as `sluice demo` does with its own, in this process."""
    config = WarmstartConfig(
        model=ModelConfig(path=".sluice/random"),
        data=DataConfig(train_path=str(FOLDER / "solutions.jsonl")),
        out_path=str(FOLDER / f"model-{num_steps}"),
        steps=num_steps,
        num_threads=1,  # with two, such a small model waits for its threads more than it computes
    )
    worker = WarmstartWorker(config)
    worker.start()
    for done in range(0, num_steps, 25):
        loss = worker.advance(min(25, num_steps - done))
        print(f"warm start {min(done + 25, num_steps):3d}/{num_steps}  loss {loss:.3f} nats per token", flush=True)
    print(f"wrote {worker.save()}")


if __name__ == "__main__":
    num_steps = int(sys.argv[1])
    if (FOLDER / f"model-{num_steps}" / "config.json").exists():
        print(f"{FOLDER} exists")
    else:
        write_problems()
        warm_start(num_steps)
