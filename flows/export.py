"""`sluice export`: a run's checkpoint as a Hugging Face folder."""

from functools import partial
from pathlib import Path

import torch

from flows.lifecycle.cancellation import run_in_thread
from flows.lifecycle.secrets import take_secrets
from infra.checkpoints.files import best_version
from infra.checkpoints.model import write_model_folder
from infra.checkpoints.store import CheckpointStore, open_checkpoints
from infra.storage.runs import RunDirectory
from schemas.errors import ConfigError, RunError
from tasks.assets import asset_at, checkpoints_of, describe
from tasks.stage import operation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_run(
    directory: RunDirectory, out: Path, *, version: int | None = None, best: bool = False, dtype: str | None = None
) -> int:
    """Write a checkpoint of a run as a Hugging Face folder: weights with adapters merged, config, tokenizer.

    Args:
        directory: The run.
        out: A folder that is empty or doesn't exist; it appears only once complete.
        version: The policy version, which is the number of finished steps; None for the newest checkpoint.
        best: Whether to export the checkpoint with the best held-out accuracy instead.
        dtype: The dtype of the weights, a key of `DTYPES`; None for the one in the model's own config.

    Raises:
        ConfigError: `out` is not empty, `dtype` is unknown, or both `version` and `best` are given.
        RunError: The run has no such checkpoint.
        CheckpointError: The checkpoint is damaged.
        ModelError: The base model of an adapter can't be loaded.
    """
    if best and version is not None:
        raise ConfigError(f"--best and --step {version} name two checkpoints; give only one of them")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; give one that is empty or doesn't exist")
    config = directory.config()
    take_secrets(config.services)
    store = open_checkpoints(directory, config.checkpoint)
    chosen = _choose(directory, store, version, best)
    write_model_folder(store, chosen, out, DTYPES[dtype] if dtype else None)
    return chosen


async def export_as_asset(
    directory: RunDirectory, out: Path, *, version: int | None = None, best: bool = False, dtype: str | None = None
) -> int:
    """Write a checkpoint as `export_run` does, by a task of the current flow run, whose asset is made of checkpoints.

    Raises:
        PipelineError: See `export_run`.
    """
    asset = asset_at(out)

    @operation("export")
    async def export_checkpoint() -> int:
        export = partial(export_run, directory, out, version=version, best=best, dtype=dtype)
        version_found = await run_in_thread(f"the export to {out}", export)
        num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        describe(asset, {"run_id": directory.run_id, "step": version_found, "bytes": num_bytes})
        return version_found

    checkpoints = checkpoints_of(directory, directory.config().checkpoint)
    return await export_checkpoint.materializing(asset, [checkpoints])()


def _choose(directory: RunDirectory, store: CheckpointStore, version: int | None, best: bool) -> int:
    """Return the version to export, verified."""
    if version is None and not best:
        if (newest := store.newest()) is None:
            raise RunError(f"run {directory.run_id} has no complete checkpoint in {store}")
        return newest[0]
    complete = store.complete_versions()
    existing = f"complete checkpoints: {', '.join(map(str, complete)) or 'none'}"
    chosen = best_version(directory.metrics.evals(), complete) if best else version
    if chosen is None:
        raise RunError(
            f"none of run {directory.run_id}'s checkpoints was evaluated; choose one with --step; {existing}"
        )
    if chosen not in complete:
        raise RunError(f"run {directory.run_id} has no checkpoint of step {chosen} in {store}; {existing}")
    store.verify(chosen)
    return chosen
