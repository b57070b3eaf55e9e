"""The demo's own preparation: problems, a tiny model, and its warm start. Made once per recipe and seed."""

import shutil
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows.warmstart import warm_start
from infra.reasoning_gym import write_rows
from infra.tiny_model import make_model
from schemas.base import Frozen
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.config.warmstart import WarmstartConfig
from tasks.stage import operation

SEED_STRIDE = 1_000_000  # reasoning-gym seeds row i with seed + i


class DemoRecipe(Frozen):
    """What the demo trains on and starts from; the sizes were chosen by measuring."""

    task: str = "chain_sum"
    settings: dict[str, Any] = {}
    num_warmstart_rows: int = 8000
    num_train_rows: int = 4000
    num_eval_rows: int = 256
    model: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "max_position_embeddings": 512,
    }
    warmstart_steps: int = 20
    warmstart_lr: float = 2e-3


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
    recipe = DemoRecipe()
    folder = Path(config.model.path).parent
    marker = folder / f"made-from-{recipe.digest}"
    if marker.exists():
        get_run_logger().info("problems and warm-started model: %s", folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_problems(config, recipe)
    make_model(folder / "random", seed=config.seed, **recipe.model)
    await warm_start(_warmstart_config(config, recipe, folder), config.runtime)
    marker.touch()


@operation("problems")
def write_problems(config: RunConfig, recipe: DemoRecipe) -> None:
    """Write the warm start's, the training and the held-out problems, each from seeds of its own."""
    assert config.data.eval_path is not None
    files = (
        (_warmstart_path(config), recipe.num_warmstart_rows),
        (Path(config.data.train_path), recipe.num_train_rows),
        (Path(config.data.eval_path), recipe.num_eval_rows),
    )
    for index, (path, size) in enumerate(files):
        seed = 3 * config.seed + index
        write_rows(path, recipe.task, size=size, seed=seed * SEED_STRIDE, settings=recipe.settings)
        get_run_logger().info("wrote %d %s problems to %s", size, recipe.task, path)


def _warmstart_path(config: RunConfig) -> Path:
    return Path(config.data.train_path).with_name("warmstart.parquet")


def _warmstart_config(config: RunConfig, recipe: DemoRecipe, folder: Path) -> WarmstartConfig:
    return WarmstartConfig(
        model=ModelConfig(path=str(folder / "random")),
        data=config.data.replace(train_path=str(_warmstart_path(config))),
        out_path=config.model.path,
        steps=recipe.warmstart_steps,
        lr=recipe.warmstart_lr,
        seed=config.seed,
        num_threads=config.runtime.num_threads,
    )
