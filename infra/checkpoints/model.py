"""Load a checkpoint as a model, or export it as a Hugging Face folder that transformers and vLLM load."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from infra.checkpoints.state import model_tensors
from infra.checkpoints.store import CheckpointStore
from infra.models.load import build_model, load_model
from infra.models.lora import add_adapter, merge_adapter
from schemas.config.model import ModelConfig


def load_checkpoint_model(store: CheckpointStore, version: int) -> PreTrainedModel:
    """Build a checkpoint's model: float32 on the CPU, in eval mode, with adapters merged into the weights.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or doesn't match the model that its config describes.
        ModelError: The base model of an adapter can't be loaded.
    """
    adapter = store.read_manifest(version).adapter
    if adapter is None:
        with store.assets(version) as assets:
            model = build_model(assets)
    else:
        model = load_model(ModelConfig(path=adapter.base_model))
        add_adapter(model, adapter.lora)
    store.load(version, model_tensors(model))
    merge_adapter(model)
    return model


def write_model_folder(store: CheckpointStore, version: int, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint as a Hugging Face folder: weights with adapters merged, config, tokenizer.

    Args:
        store: The run's checkpoints.
        version: The version to export.
        out: A folder that is empty or doesn't exist; it appears only once complete.
        dtype: The dtype of the weights; None for the one in the model's own config, or float32 if it has none.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or doesn't match the model that its config describes.
        ModelError: The base model of an adapter can't be loaded.
    """
    model = load_checkpoint_model(store, version)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        staged = Path(temporary, out.name)
        with store.assets(version) as assets:
            shutil.copytree(assets, staged)
            own_dtype = AutoConfig.from_pretrained(assets).dtype or torch.float32
        model.to(dtype or own_dtype).save_pretrained(staged)  # type: ignore[arg-type]
        os.replace(staged, out)
