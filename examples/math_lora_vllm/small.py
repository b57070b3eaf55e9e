"""Make the small run's files in `.sluice/small`.

The problems are additions worded as in GSM8K. Supervised fine-tuning shows the model how to solve them; half of its
solutions lack the last line, "#### " and the number, without which the reward is 0. That is what GRPO then improves.
"""

import random
from pathlib import Path

from convert import convert, write_rows

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
    """Write training and held-out problems, and the solutions of supervised fine-tuning."""
    rng = random.Random(0)
    heldout = [problem(rng) for _ in range(64)]
    seen = {row["question"] for row in heldout}
    train = [row for row in (problem(rng) for _ in range(4000)) if row["question"] not in seen]
    solved = [row for row in (problem(rng, 0.5) for _ in range(10000)) if row["question"] not in seen]
    write_rows(FOLDER / "heldout.jsonl", convert(heldout, instruction=""))
    write_rows(FOLDER / "train.jsonl", convert(train, instruction=""))
    solutions = zip(convert(solved, instruction=""), solved, strict=True)
    write_rows(
        FOLDER / "solutions.jsonl",
        [{"prompt": row["prompt"], "completion": shown["answer"]} for row, shown in solutions],
    )


if __name__ == "__main__":
    if (FOLDER / "solutions.jsonl").exists():
        print(f"{FOLDER} exists")
    else:
        write_problems()
