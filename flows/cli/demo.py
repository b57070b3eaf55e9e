"""The demo's preparation: problems, a tiny model, and its supervised fine-tuning. Made once per recipe and seed."""

import random
import shutil
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from flows.cli.run import run_training
from infra.storage.runs import RunDirectory, new_run_id
from schemas.base import Frozen
from schemas.config.run import RunConfig

Row = dict[str, Any]


class DemoRecipe(Frozen):
    """The demo's sums and model, chosen by measuring."""

    num_terms: tuple[int, int]  # the least and the most of a sum
    largest: int  # term; the least is 0
    worked_fraction: float  # of the demonstrations: these write out every step, the others only the sum
    num_demonstrations: int
    num_train_rows: int
    num_eval_rows: int
    model: dict[str, Any]  # fields of Qwen3Config


RECIPE = DemoRecipe(
    num_terms=(4, 6),
    largest=10,
    worked_fraction=0.4,
    num_demonstrations=16000,
    num_train_rows=4000,
    num_eval_rows=256,
    model={
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "initializer_range": 0.07,
    },
)
TINY = RECIPE.replace(num_demonstrations=1000, num_train_rows=200, num_eval_rows=32)


def demo_folder(seed: int, tiny: bool = False) -> Path:
    """Return the folder of the files that are made for a seed."""
    return Path(f".sluice/demo/{'tiny-' if tiny else ''}seed-{seed}")


def demo_overrides(seed: int, tiny: bool = False) -> list[str]:
    """Return the overrides of the demo's config for a seed: the seed, and the files made from it."""
    folder = demo_folder(seed, tiny)
    return [
        *(["steps=2"] if tiny else []),
        f"seed={seed}",
        f"model.path={folder}/model",
        f"data.train_path={folder}/train.parquet",
        f"data.eval_path={folder}/heldout.parquet",
    ]


def sft_overrides(seed: int, tiny: bool = False) -> list[str]:
    """Return the same of the config of supervised fine-tuning, which trains the model that the demo begins with."""
    folder = demo_folder(seed, tiny)
    return [
        *(["steps=2", "optim.warmup_updates=5"] if tiny else []),
        f"seed={seed}",
        f"model.path={folder}/random",
        f"data.train_path={folder}/demonstrations.parquet",
    ]


def is_made(folder: Path, sft: RunConfig, recipe: DemoRecipe) -> bool:
    """Return whether a folder has all that `prepare` makes."""
    return _marker(folder, sft, recipe).exists()


def make_inputs(folder: Path, sft: RunConfig, recipe: DemoRecipe) -> None:
    """Make the files that supervised fine-tuning and GRPO begin with, and encode the rows of the first.

    This may run in a thread: it only computes.

    Args:
        folder: See `demo_folder`; what is in it is removed.
        sft: The config of supervised fine-tuning.
        recipe: The problems and the model.
    """
    from infra.workers.inputs import open_rows

    shutil.rmtree(folder, ignore_errors=True)
    make_files(folder, sft.seed, recipe)
    open_rows(None, sft, "train")


def prepare(console: Console, config: RunConfig, folder: Path, sft: RunConfig, recipe: DemoRecipe) -> None:
    """Make the model that the demo's config names: by supervised fine-tuning of that of `make_inputs`.

    Args:
        console: Where the summary of supervised fine-tuning goes.
        config: The demo's config.
        folder: See `demo_folder`.
        sft: The config of supervised fine-tuning, which runs where the demo does.
        recipe: The problems and the model.
    """
    from flows.export import export_run  # not at the top: it imports torch

    runtime = sft.runtime.replace(runs_dir=config.runtime.runs_dir, device=config.runtime.device)
    run_id = new_run_id(sft.name)
    placed = sft.replace(services=config.services, runtime=runtime)
    run_training(console, placed, run_id)
    export_run(RunDirectory.at(placed, run_id), folder / "model")
    _marker(folder, sft, recipe).touch()


def _marker(folder: Path, sft: RunConfig, recipe: DemoRecipe) -> Path:
    return folder / f"made-from-{recipe.digest}-{sft.digest}"


def make_files(folder: Path, seed: int, recipe: DemoRecipe) -> None:
    """Write the held-out problems, the training's and the demonstrations without those, and a model without training.

    Args:
        folder: An empty folder, or one that doesn't exist.
        seed: Seed of problems and weights.
        recipe: What to make.
    """
    from infra.models.tiny import make_model  # not at the top: it imports transformers

    rng = random.Random(seed)
    heldout, train, shown = (
        [tuple(rng.randint(0, recipe.largest) for _ in range(rng.randint(*recipe.num_terms))) for _ in range(size)]
        for size in (recipe.num_eval_rows, recipe.num_train_rows, recipe.num_demonstrations)
    )
    known = set(heldout)
    files = {
        "heldout": map(_problem, heldout),
        "train": (_problem(terms) for terms in train if terms not in known),
        "demonstrations": (
            _demonstration(terms, works_out=rng.random() < recipe.worked_fraction)
            for terms in shown
            if terms not in known
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(list(rows)), folder / f"{name}.parquet")
    make_model(folder / "random", seed=seed, **recipe.model)


def _problem(terms: Sequence[int]) -> Row:
    return {"data_source": "sums", "prompt": _question(terms), "reward_model": {"ground_truth": str(sum(terms))}}


def _demonstration(terms: Sequence[int], *, works_out: bool) -> Row:
    answer = work_out(terms) if works_out else f"={sum(terms)}"
    return {"prompt": _question(terms), "completion": [{"role": "assistant", "content": answer}]}


def _question(terms: Sequence[int]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Calculate {' + '.join(map(str, terms))}."}]


def work_out(terms: Sequence[int]) -> str:
    """Return a sum step by step: that of 5, 9 and 7 is "5+9=14, 14+7=21"."""
    totals = pairwise(accumulate(terms))
    return ", ".join(
        f"{total}+{term}={next_total}" for term, (total, next_total) in zip(terms[1:], totals, strict=True)
    )
