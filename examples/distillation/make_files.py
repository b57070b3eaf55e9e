"""Make the prompts, a teacher and a smaller student: `make_files.py FOLDER SEED [TEACHER_STEPS STUDENT_STEPS]`.

Both models are trained on sums that are worked out step by step, the teacher for long, the student for so short a time
that it writes such sums, but most of its numbers are wrong.
"""

import json
import random
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from infra.models.tiny import make_model
from infra.workers.warmstart import WarmstartWorker
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig
from schemas.config.warmstart import WarmstartConfig

NUM_TERMS = 4
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
MODELS = {"teacher": {"hidden_size": 128, "head_dim": 32}, "student": {"hidden_size": 64, "head_dim": 16}}
STEPS = {"teacher": 400, "student": 300}


def main(folder: Path, seed: int, steps: dict[str, int]) -> None:
    """Write what `config.toml` names."""
    if (folder / "student" / "config.json").exists():
        print(f"{folder} has all files")
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    sums = [tuple(draw.randint(1, 9) for _ in range(NUM_TERMS)) for _ in range(6000)]
    heldout = sorted(set(sums[:128]))
    others = [terms for terms in sums if terms not in set(heldout)]
    write_rows(folder / "heldout.jsonl", [row(terms, str(sum(terms))) for terms in heldout])
    write_rows(folder / "train.jsonl", [row(terms, str(sum(terms))) for terms in others[:2000]])
    write_rows(folder / "worked.jsonl", [row(terms, work_out(terms)) for terms in others])
    for number, (name, sizes) in enumerate(MODELS.items()):
        random_model = make_model(
            folder / f"random-{name}",
            seed=2 * seed + number,
            intermediate_size=3 * sizes["hidden_size"],
            **SHAPE,
            **sizes,
        )
        worker = WarmstartWorker(
            WarmstartConfig(
                model=ModelConfig(path=str(random_model)),
                data=DataConfig(train_path=str(folder / "worked.jsonl")),
                out_path=str(folder / name),
                steps=steps[name],
                seed=seed,
            )
        )
        worker.start()
        loss = worker.advance(steps[name])
        print(f"wrote the {name} to {worker.save()}; its mean loss was {loss:.3f} nats per token")


def work_out(terms: tuple[int, ...]) -> str:
    """Return a sum step by step: (5, 9, 7) gives "5+9=14, 14+7=21"."""
    totals = pairwise(accumulate(terms))
    return ", ".join(f"{before}+{term}={after}" for term, (before, after) in zip(terms[1:], totals, strict=True))


def row(terms: tuple[int, ...], answer: str) -> dict[str, Any]:
    """Return a data row."""
    prompt = [{"role": "user", "content": "+".join(map(str, terms))}]
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": answer}}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    given = dict(zip(STEPS, map(int, sys.argv[3:]), strict=False))
    main(Path(sys.argv[1]), int(sys.argv[2]), STEPS | given)
