"""Checks that a Hugging Face model folder has its files, before transformers looks for them and asks the hub often."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import AutoConfig, PreTrainedConfig

from schemas.errors import ModelError

MODEL_FILES = ("config.json",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model_folder(key: str, path: str, any_of: Sequence[str] = MODEL_FILES) -> None:
    """Check the files of a local folder; a path that doesn't exist may be a model name on the hub, which is asked once.

    Args:
        key: The config key of the path, for errors.
        path: The folder, or the model's name on the hub.
        any_of: The files of which the folder must have one, next to its config.

    Raises:
        ModelError: There is no such folder and no such model, or the folder has none of the files.
    """
    folder, place = Path(path), f"{key} {path}"
    if folder.is_file():
        raise ModelError(f"{place} is a file; give the Hugging Face folder that contains it")
    if not folder.exists():
        if _on_hub(path):
            return
        raise ModelError(
            f"{place}: no such folder (and no such model on the Hugging Face hub, or no network); give a Hugging "
            "Face model folder"
        )
    if not (folder / "config.json").exists():
        raise ModelError(f"{place}: config.json is missing; give a Hugging Face model folder")
    if not any((folder / name).exists() for name in any_of):
        raise ModelError(
            f"{place}: found none of {', '.join(any_of)}; save the tokenizer there with "
            "`tokenizer.save_pretrained(folder)`"
        )


def load_config(path: str | Path, key: str = "model.path") -> PreTrainedConfig:
    """Load the config of a model.

    Args:
        path: The folder, or the model's name on the hub.
        key: The config key of the path, for errors.

    Raises:
        ModelError: It can't be read, or has fields of other types than its kind of model.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises unrelated types, which have several lines, for bad fields
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{key} {path}: config.json can't be read: {reason:.300}; correct it, or take it from the model's "
            "original folder"
        ) from error
    return config


def _on_hub(name: str) -> bool:
    """Return whether the hub or its local cache has a model of this name; asks once, without retries."""
    try:
        validate_repo_id(name)
        return bool(try_to_load_from_cache(name, "config.json")) or HfApi().model_info(name, timeout=10) is not None
    except Exception:  # noqa: BLE001 - the HTTP client's errors share no base across versions; all mean "not found"
        return False
