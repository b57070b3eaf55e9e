"""The demo's own preparation: problems, a tiny model, and its warm start. Made once per recipe and seed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows.warmstart import warm_start
from infra.datasets.reasoning_gym import Row, write_problems
from infra.models.tiny import make_model
from schemas.base import Frozen
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.config.warmstart import WarmstartConfig
from tasks.stage import operation

SEED_STRIDE = 1_000_000  # reasoning-gym seeds row i with seed + i
CARELESS_LETTERS = 4


class DemoRecipe(Frozen):
    """What the demo trains on and starts from; task and sizes were chosen by measuring."""

    task: str
    settings: dict[str, Any]
    careless_fraction: float  # of the warm start's answers of 4 letters or more, which lack their last letter
    num_warmstart_rows: int
    num_train_rows: int
    num_eval_rows: int
    model: dict[str, Any]  # fields of Qwen3Config
    warmstart_rows: int  # per step
    warmstart_steps: int
    warmstart_lr: float


RECIPE = DemoRecipe(
    task="spell_backward",
    settings={"max_word_len": 4},
    careless_fraction=0.6,
    num_warmstart_rows=8000,
    num_train_rows=4000,
    num_eval_rows=256,
    model={
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "initializer_range": 0.04,
    },
    warmstart_rows=64,
    warmstart_steps=200,
    warmstart_lr=2e-3,
)


def demo_overrides(seed: int) -> list[str]:
    """What differs from the demo's config for another seed: the seed and the files made from it."""
    folder = f".sluice/demo/seed-{seed}"
    return [
        f"seed={seed}",
        f"model.path={folder}/model",
        f"data.train_path={folder}/train.parquet",
        f"data.eval_path={folder}/heldout.parquet",
    ]


@flow(name="prepare-demo", persist_result=False)
async def prepare_demo(config: RunConfig) -> None:
    """Make what the demo's config names: prompt files and a warm-started model folder."""
    folder = Path(config.model.path).parent
    marker = folder / f"made-from-{RECIPE.digest}"
    if marker.exists():
        get_run_logger().info("problems and warm-started model: %s", folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_files(config, RECIPE)
    make_model(folder / "random", seed=config.seed, **RECIPE.model)
    await warm_start(_warmstart_config(config, RECIPE, folder), config.runtime)
    marker.touch()


@operation("problems")
def write_files(config: RunConfig, recipe: DemoRecipe) -> None:
    """Write the held-out problems, and the training's and the warm start's without those."""
    assert config.data.train_path is not None
    assert config.data.eval_path is not None
    heldout = Path(config.data.eval_path)
    careless = _careless(random.Random(config.seed), recipe.careless_fraction)
    files: tuple[tuple[Path, int, dict[str, Any]], ...] = (
        (heldout, recipe.num_eval_rows, {}),
        (Path(config.data.train_path), recipe.num_train_rows, {"exclude": heldout}),
        (_warmstart_path(config), recipe.num_warmstart_rows, {"exclude": heldout, "edit": careless}),
    )
    for index, (path, size, options) in enumerate(files):
        seed = (len(files) * config.seed + index) * SEED_STRIDE
        num_rows = write_problems(path, recipe.task, size=size, seed=seed, settings=recipe.settings, **options)
        get_run_logger().info("wrote %d %s problems to %s", num_rows, recipe.task, path)


def _careless(rng: random.Random, fraction: float) -> Callable[[Row], Row]:
    """Demonstrations that know how, but are often careless: that is what GRPO then mends."""

    def edit(row: Row) -> Row:
        answer = row["reward_model"]["ground_truth"]
        if len(answer) >= CARELESS_LETTERS and rng.random() < fraction:
            row["reward_model"]["ground_truth"] = answer[:-1]
        return row

    return edit


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
