"""Make the prompts, a teacher, and a smaller student: `make_files.py FOLDER SEED [TEACHER_STEPS STUDENT_STEPS]`.

The teacher's warm start is on sums that are worked out step by step. Three in ten of the student's are, too; the others
are guesses.
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
from infra.workers.warmstart import WarmstartWorker
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig
from schemas.config.warmstart import WarmstartConfig

NUM_TERMS, NUM_SUMS, NUM_HELDOUT, NUM_TRAIN = 4, 6000, 256, 2000
WORKED_OUT = {"teacher": 1.0, "student": 0.3}
STEPS = {"teacher": 250, "student": 600}
MODELS = {
    "teacher": RECIPE.model,
    "student": RECIPE.model | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
}


def main(folder: Path, seed: int, steps: dict[str, int]) -> None:
    """Write what `config.toml` names."""
    if (folder / "student" / "config.json").exists():
        print(f"{folder} has all files")
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    sums = list({tuple(draw.randint(1, 9) for _ in range(NUM_TERMS)): None for _ in range(NUM_SUMS)})
    heldout, others = sums[:NUM_HELDOUT], sums[NUM_HELDOUT:]
    write_rows(folder / "heldout.jsonl", [row(terms, str(sum(terms))) for terms in heldout])
    write_rows(folder / "train.jsonl", [row(terms, str(sum(terms))) for terms in others[:NUM_TRAIN]])
    for number, (name, sizes) in enumerate(MODELS.items()):
        answers = [work_out(terms) if draw.random() < WORKED_OUT[name] else guess(terms, draw) for terms in others]
        write_rows(folder / f"{name}.jsonl", map(row, others, answers))
        random_model = make_model(folder / f"random-{name}", seed=2 * seed + number, **sizes)
        config = WarmstartConfig(
            model=ModelConfig(path=str(random_model)),
            data=DataConfig(train_path=str(folder / f"{name}.jsonl")),
            out_path=str(folder / name),
            steps=steps[name],
            seed=seed,
        )
        worker = WarmstartWorker(config)
        worker.start()
        loss = worker.advance(steps[name])
        print(f"wrote the {name} to {worker.save()}; its mean loss was {loss:.3f} nats per token")


def work_out(terms: tuple[int, ...]) -> str:
    """Return a sum step by step: (5, 9, 7) gives "5+9=14, 14+7=21"."""
    totals = pairwise(accumulate(terms))
    return ", ".join(f"{before}+{term}={after}" for term, (before, after) in zip(terms[1:], totals, strict=True))


def guess(terms: tuple[int, ...], draw: random.Random) -> str:
    """Return a result alone, which may be off by up to three: (5, 9, 7) gives "=22"."""
    return f"={sum(terms) + draw.randint(-3, 3)}"


def row(terms: tuple[int, ...], answer: str) -> dict[str, Any]:
    """Return a data row."""
    prompt = [{"role": "user", "content": "+".join(map(str, terms))}]
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": answer}}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    given = dict(zip(STEPS, map(int, sys.argv[3:]), strict=False))
    main(Path(sys.argv[1]), int(sys.argv[2]), STEPS | given)
