"""A checkpoint as a model, and as an ordinary Hugging Face folder, which transformers and vLLM load."""

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
    """Build a checkpoint's model: in float32 on the CPU, in eval mode, its adapters merged into the weights.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or not of the model that its config describes.
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
        store: Where the checkpoint is.
        version: Which one.
        out: A folder that is empty or not there; it appears when it is whole.
        dtype: Of the weights; None for the one that the model's own config names, float32 if it names none.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or not of the model that its config describes.
        ModelError: The base model of an adapter can't be loaded.
    """
    model = load_checkpoint_model(store, version)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as aside:
        made = Path(aside, out.name)
        with store.assets(version) as assets:
            shutil.copytree(assets, made)
            own_dtype = AutoConfig.from_pretrained(assets).dtype or torch.float32
        model.to(dtype or own_dtype).save_pretrained(made)  # type: ignore[arg-type]
        os.replace(made, out)
