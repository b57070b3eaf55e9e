"""The demo's preparation: problems, a tiny model, and its warm start. Made once per recipe and seed."""

import json
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows.warmstart import warm_start
from schemas.base import Frozen
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.config.warmstart import WarmstartConfig
from schemas.errors import ConfigError
from tasks.stage import operation

Row = dict[str, Any]

SEED_STRIDE = 1_000_000  # reasoning-gym seeds row i with seed + i


class DemoRecipe(Frozen):
    """The demo's task, model and warm start, chosen by measuring."""

    task: str
    settings: dict[str, Any]
    worked_fraction: float  # of the warm start's demonstrations: these write out every step, the others only the sum
    num_warmstart_rows: int
    num_train_rows: int
    num_eval_rows: int
    model: dict[str, Any]  # fields of Qwen3Config
    warmstart_rows: int  # per step
    warmstart_steps: int
    warmstart_lr: float


RECIPE = DemoRecipe(
    task="basic_arithmetic",
    settings={
        "operators": ["+"],
        "min_terms": 4,
        "max_terms": 6,
        "min_digits": 1,
        "max_digits": 1,
        "allow_parentheses": False,
        "allow_negation": False,
    },
    worked_fraction=0.4,
    num_warmstart_rows=20000,
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
    warmstart_rows=32,
    warmstart_steps=550,
    warmstart_lr=2e-3,
)
TINY = RECIPE.replace(num_warmstart_rows=1000, num_train_rows=200, num_eval_rows=32, warmstart_steps=20)


def demo_overrides(seed: int, tiny: bool = False) -> list[str]:
    """Return the overrides of the demo's config for a seed: the seed, and the files made from it."""
    folder = f".sluice/demo/{'tiny-' if tiny else ''}seed-{seed}"
    return [
        *(["steps=2"] if tiny else []),
        f"seed={seed}",
        f"model.path={folder}/model",
        f"data.train_path={folder}/train.parquet",
        f"data.eval_path={folder}/heldout.parquet",
    ]


def require_reasoning_gym() -> None:
    """Check that the package that makes the demo's problems is installed, without importing it.

    Raises:
        ConfigError: It isn't.
    """
    if find_spec("reasoning_gym") is None:
        raise ConfigError("the demo's problems need reasoning-gym: pip install 'sluice-rl[demo]'")


@flow(name="prepare-demo", flow_run_name="prepare-demo-{config.seed}", persist_result=False)
async def prepare_demo(config: RunConfig, recipe: DemoRecipe) -> None:
    """Make what the demo's config names: prompt files and a warm-started model folder."""
    folder = Path(config.model.path).parent
    marker = folder / f"made-from-{recipe.digest}"
    if marker.exists():
        get_run_logger().info("problems and warm-started model: %s", folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    from infra.models.tiny import make_model  # not at the top: torch is imported with it

    write_files(config, recipe)
    make_model(folder / "random", seed=config.seed, **recipe.model)
    await warm_start(_warmstart_config(config, recipe, folder), config.services)
    marker.touch()


@operation("problems")
def write_files(config: RunConfig, recipe: DemoRecipe) -> None:
    """Write the held-out problems, and the training's and the warm start's without those."""
    from infra.datasets.reasoning_gym import write_problems  # not at the top: transformers is imported with it

    assert config.data.train_path is not None
    assert config.data.eval_path is not None
    heldout = Path(config.data.eval_path)
    demonstrate = _demonstrate(random.Random(config.seed), recipe.worked_fraction)
    files: tuple[tuple[Path, int, dict[str, Any]], ...] = (
        (heldout, recipe.num_eval_rows, {}),
        (Path(config.data.train_path), recipe.num_train_rows, {"exclude": heldout}),
        (_warmstart_path(config), recipe.num_warmstart_rows, {"exclude": heldout, "edit": demonstrate}),
    )
    for index, (path, size, options) in enumerate(files):
        seed = (len(files) * config.seed + index) * SEED_STRIDE
        num_rows = write_problems(path, recipe.task, size=size, seed=seed, settings=recipe.settings, **options)
        get_run_logger().info("wrote %d %s problems to %s", num_rows, recipe.task, path)


def _demonstrate(rng: random.Random, worked_fraction: float) -> Callable[[Row], Row]:
    """Return an edit that turns a problem's sum into a demonstration: worked out step by step, or the sum alone."""

    def edit(row: Row) -> Row:
        expression = json.loads(row["extra_info"]["metadata"])["expression"]
        total = row["reward_model"]["ground_truth"]
        is_worked = rng.random() < worked_fraction
        row["reward_model"]["ground_truth"] = work_out(expression) if is_worked else f"={total}"
        return row

    return edit


def work_out(expression: str) -> str:
    """Return a sum step by step: "5 + 9 + 7" gives "5+9=14, 14+7=21"."""
    terms = [int(term) for term in expression.split(" + ")]
    totals = pairwise(accumulate(terms))
    return ", ".join(
        f"{total}+{term}={next_total}" for term, (total, next_total) in zip(terms[1:], totals, strict=True)
    )


def _warmstart_path(config: RunConfig) -> Path:
    assert config.data.train_path is not None
    return Path(config.data.train_path).with_name("warmstart.parquet")


def _warmstart_config(config: RunConfig, recipe: DemoRecipe, folder: Path) -> WarmstartConfig:
    return WarmstartConfig(
        model=ModelConfig(path=str(folder / "random")),
        data=config.data.replace(train_path=str(_warmstart_path(config))),
        out_path=config.model.path,
        steps=recipe.warmstart_steps,
        num_rows=recipe.warmstart_rows,
        lr=recipe.warmstart_lr,
        seed=config.seed,
        num_threads=config.runtime.num_threads,
    )
