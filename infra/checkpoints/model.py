"""Load a checkpoint as a model, or export it as a Hugging Face folder that transformers and vLLM load."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from shutil import ignore_patterns
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from infra.checkpoints.state import model_tensors
from infra.checkpoints.store import CheckpointStore
from infra.models.assets import keep_dropout
from infra.models.files import weights_digest
from infra.models.load import build_model, cast_model, load_model
from infra.models.lora import add_adapter, merge_adapter
from infra.storage.folder import make_folder, sync_folder, sync_tree
from rl_core.model_folder import load_config
from schemas.config.model import ModelConfig
from schemas.errors import ModelError


def load_checkpoint_model(store: CheckpointStore, version: int) -> PreTrainedModel:
    """Build a checkpoint's model: float32 on the CPU, in eval mode, with adapters merged into the weights.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or doesn't match the model that its config describes.
        ModelError: The base model of an adapter can't be loaded, or is another one.
    """
    adapter = store.read_manifest(version).adapter
    if adapter is None:
        with store.assets(version) as assets:
            model = build_model(assets)
    else:
        if adapter.base_digest and weights_digest(adapter.base_model) not in ("", adapter.base_digest):
            raise ModelError(
                f"{adapter.base_model} is not the model that the adapter in {store.path(version)} was trained on; "
                "restore that folder; or, to merge it with what is there now, remove base_digest from manifest.json"
            )
        model = load_model(ModelConfig(path=adapter.base_model))
        add_adapter(model, adapter.lora)
    store.load(version, model_tensors(model))
    merge_adapter(model)
    return model


def write_model_folder(
    store: CheckpointStore, version: int, out: Path, dtype: torch.dtype | None = None, *, is_durable: bool = True
) -> None:
    """Write a checkpoint as a Hugging Face folder: weights with adapters merged, config, tokenizer.

    Args:
        store: The run's checkpoints.
        version: The version to export.
        out: A folder that is empty or doesn't exist; it appears only once complete.
        dtype: The dtype of the weights; None for the one in the model's own config, or float32 if it has none.
        is_durable: Whether it is also on disk, before it appears.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or doesn't match the model that its config describes.
        ModelError: The base model of an adapter can't be loaded.
    """
    model = load_checkpoint_model(store, version)
    out = out.resolve()
    make_folder(str(out.parent))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        staged = Path(temporary, out.name)
        with store.assets(version) as assets:
            own_dtype = load_config(assets).dtype
            cast_model(model, dtype or (own_dtype if isinstance(own_dtype, torch.dtype) else torch.float32))
            _save(model, staged)
            _copy_assets(assets, staged)
        if is_durable:
            sync_tree(staged)
        os.replace(staged, out)
        if is_durable:
            sync_folder(str(out))


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights, and a config of theirs."""
    model.generation_config = GenerationConfig()  # its own may be one that can't be written; it is copied instead
    model.save_pretrained(folder)
    Path(folder, GENERATION_CONFIG_NAME).unlink()


def _copy_assets(assets: Path, folder: Path) -> None:
    """Copy the model's own files next to its weights, byte for byte where they describe the weights.

    The model's own config is left out if it is that of a larger model, of which this is the part for text, but for the
    dropout that is removed in training; and its dtype is replaced if it isn't that of the weights.
    """
    written = json.loads(Path(folder, CONFIG_NAME).read_text())
    config = json.loads(Path(assets, CONFIG_NAME).read_text())
    is_same = config["model_type"] == written["model_type"]
    shutil.copytree(assets, folder, dirs_exist_ok=True, ignore=None if is_same else ignore_patterns(CONFIG_NAME))
    if is_same and _set_dtype(config, written["dtype"]):
        Path(folder, CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    if not is_same:
        keep_dropout(folder, str(assets))


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Write a dtype into a config, under the key that it has, and return whether that changed it."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    changed = any(config.get(key, "float32") != dtype for key in keys)
    config.update(dict.fromkeys(keys, dtype))
    parts = [part for part in config.values() if isinstance(part, dict) and part.keys() & {"dtype", "torch_dtype"}]
    return any([changed, *(_set_dtype(part, dtype) for part in parts)])
