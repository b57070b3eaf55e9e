"""Make the prompts, and an untrained teacher and a smaller student, each with its sums: `make_files.py FOLDER SEED`.

The teacher's sums are worked out step by step. Three in ten of the student's are, too; the others are guesses.
"""

import json
import random
import sys
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from flows.cli.demo import RECIPE
from infra.models.tiny import make_model

NUM_TERMS, NUM_SUMS, NUM_HELDOUT, NUM_TRAIN = 4, 6000, 256, 2000
WORKED_OUT = {"teacher": 1.0, "student": 0.3}
MODELS = {
    "teacher": RECIPE.model,
    "student": RECIPE.model | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
}


def main(folder: Path, seed: int) -> None:
    """Write what `config.toml` names, but for the trained models."""
    if (folder / "random-student" / "config.json").exists():
        print(f"{folder} has all files")
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    sums = list(dict.fromkeys(tuple(draw.randint(1, 9) for _ in range(NUM_TERMS)) for _ in range(NUM_SUMS)))
    heldout, others = sums[:NUM_HELDOUT], sums[NUM_HELDOUT:]
    write_rows(folder / "heldout.jsonl", map(row, heldout))
    write_rows(folder / "train.jsonl", map(row, others[:NUM_TRAIN]))
    for number, (name, sizes) in enumerate(MODELS.items()):
        answers = [work_out(terms) if draw.random() < WORKED_OUT[name] else guess(terms, draw) for terms in others]
        chats = ({"messages": [*ask(terms), say(answer)]} for terms, answer in zip(others, answers, strict=True))
        write_rows(folder / f"{name}.jsonl", chats)
        make_model(folder / f"random-{name}", seed=2 * seed + number, **sizes)


def work_out(terms: tuple[int, ...]) -> str:
    """Return a sum step by step: (5, 9, 7) gives "5+9=14, 14+7=21"."""
    totals = pairwise(accumulate(terms))
    return ", ".join(f"{before}+{term}={after}" for term, (before, after) in zip(terms[1:], totals, strict=True))


def guess(terms: tuple[int, ...], draw: random.Random) -> str:
    """Return a result alone, which may be off by up to three: (5, 9, 7) gives "=22"."""
    return f"={sum(terms) + draw.randint(-3, 3)}"


def ask(terms: tuple[int, ...]) -> list[dict[str, str]]:
    """Return a chat with the question alone."""
    return [{"role": "user", "content": "+".join(map(str, terms))}]


def say(answer: str) -> dict[str, str]:
    """Return the model's turn."""
    return {"role": "assistant", "content": answer}


def row(terms: tuple[int, ...]) -> dict[str, Any]:
    """Return a data row."""
    return {"data_source": "sums", "prompt": ask(terms), "reward_model": {"ground_truth": str(sum(terms))}}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
