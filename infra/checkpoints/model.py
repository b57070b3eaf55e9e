"""Export a checkpoint as a Hugging Face folder that transformers and vLLM load, with memory for a part of it."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import ignore_patterns
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from infra.checkpoints.state import MODEL, model_tensors
from infra.checkpoints.store import CheckpointStore
from infra.models.assets import keep_dropout
from infra.models.files import INDEX, SINGLE, weights_digest
from infra.models.load import cast_model, empty_model
from infra.models.lora import adapter_deltas, add_adapter
from infra.models.weights import StoredWeights, load_weights, stored_tensors
from infra.storage.folder import make_folder, sync_folder, sync_tree
from rl_core.model_folder import load_config
from schemas.config.model import ModelConfig
from schemas.errors import ModelError

SHARD_BYTES = 5 * 10**9  # of a file of weights, as on the hub

Weights = tuple[PreTrainedModel, Callable[[str], Tensor]]  # a model without values, and what reads one by its name


@contextmanager
def _opened(store: CheckpointStore, version: int, assets: Path) -> Iterator[Weights]:
    """Hold a checkpoint's model on the meta device, and what reads its weights, with adapters merged, in float32.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or doesn't match the model that its config describes.
        ModelError: The base model of an adapter can't be loaded, or is another one.
    """
    adapter = store.read_manifest(version).adapter
    with store.opened(version):
        if adapter is None:
            model = empty_model(ModelConfig(path=str(assets)))
            tensors = model_tensors(model)
            store.check_tensors(version, tensors)
            names = {id(weight): name for name, weight in tensors.items()}  # of tied ones, one is stored
            state = model.state_dict(keep_vars=True)
            yield model, lambda name: store.read(version, names[id(state[name])])
            return
        if adapter.base_digest and weights_digest(adapter.base_model) not in ("", adapter.base_digest):
            raise ModelError(
                f"{adapter.base_model} is not the model that the adapter in {store.path(version)} was trained on; "
                "restore that folder; or, to merge it with what is there now, remove base_digest from manifest.json"
            )
        base = ModelConfig(path=adapter.base_model)
        model, adapted = empty_model(base), empty_model(base)
        load_weights(model, base.path, torch.device("meta"))  # checks that the folder covers it
        add_adapter(adapted, adapter.lora)
        tensors = {name: torch.empty_like(weight, device="cpu") for name, weight in model_tensors(adapted).items()}
        store.load(version, tensors)
        values = {name.removeprefix(f"{MODEL}/"): value for name, value in tensors.items()}
        adapted.load_state_dict(values, strict=False, assign=True)
        deltas = adapter_deltas(adapted)
        with StoredWeights(model, base.path) as stored, torch.no_grad():
            yield model, lambda name: stored.read(name) + deltas[name]() if name in deltas else stored.read(name)


def write_model_folder(
    store: CheckpointStore, version: int, out: Path, dtype: torch.dtype | None = None, *, is_durable: bool = True
) -> None:
    """Write a checkpoint as a Hugging Face folder: weights with adapters merged, config, tokenizer.

    Weights are read and written one file of `SHARD_BYTES` after the other, which is the memory that it takes, besides a
    tensor and what it is made of.

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
    out = out.resolve()
    make_folder(str(out.parent))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        staged = Path(temporary, out.name)
        with store.assets(version) as assets:
            own_dtype = load_config(assets).dtype
            with _opened(store, version, assets) as (model, read):
                cast_model(model, dtype or (own_dtype if isinstance(own_dtype, torch.dtype) else torch.float32))
                _save(model, read, staged)
            _copy_assets(assets, staged)
        if is_durable:
            sync_tree(staged)
        os.replace(staged, out)
        if is_durable:
            sync_folder(str(out))


def _save(model: PreTrainedModel, read: Callable[[str], Tensor], folder: Path) -> None:
    """Write a model's config, and its weights in its dtypes, in the form in which transformers saves them."""
    model.generation_config = GenerationConfig()  # its own may be one that can't be written; it is copied instead
    model.save_pretrained(folder, state_dict={})  # all but the weights
    Path(folder, GENERATION_CONFIG_NAME).unlink()
    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: value for name, value in model.state_dict().items() if name not in ignored}
    state = remove_tied_weights_from_state_dict(state, model)
    empty = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    made = {name: value for part in stored_tensors(model, empty, empty.__getitem__) for name, value in part.items()}
    split = split_state_dict_into_shards_factory(
        made,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=SINGLE.replace(".", "{suffix}."),
        max_shard_size=SHARD_BYTES,
    )
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    for part in stored_tensors(model, state, lambda name: read(name).to(state[name].dtype)):
        for name, value in part.items():
            shard = waiting[file := split.tensor_to_filename[name]]
            shard[name] = value.contiguous()
            if len(shard) == len(split.filename_to_tensors[file]):
                save_file(waiting.pop(file), folder / file, metadata={"format": "pt"})
                del shard, value
    if split.is_sharded:
        totals = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": totals, "weight_map": split.tensor_to_filename}
        Path(folder, INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


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
