"""A model folder's files other than its weights: its config, and all that its tokenizer and processor consist of."""

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers.utils import CONFIG_NAME

from rl_core.model_folder import load_config
from schemas.config.model import ModelConfig
from schemas.errors import ModelError, first_line

# `tokenizer.model.v3` is Mistral's, `*.spm` and `*.bpe` are Marian's and GPT-2's.
_PATTERNS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.model.v*",
    "*.spm",
    "*.bpe",
    "*.tokenizer",
    "*.txt",
    "*.tiktoken",
    "*.py",
)
_INDEX = ".index.json"  # of weights in several files
_TEMPLATES = "additional_chat_templates"
_NAME = re.compile(r"\w[\w.-]*")  # as files of a checkpoint may be named
_MAX_BYTES = 2**27  # whatever is larger isn't an asset


def save_assets(config: ModelConfig, folder: Path) -> None:
    """Copy a model's config, tokenizer, chat template, generation config and processor, byte for byte.

    Nothing is parsed and written again: a file that this transformers would write in another form, or refuse to write,
    stays as its authors made it.

    Args:
        config: The model, a folder or a name on the hub.
        folder: Where to; made if it isn't there.

    Raises:
        ModelError: The model isn't in a folder, and its files can't be had from the hub or its cache.
    """
    source = _local_folder(config.path)
    for name in _asset_names(source):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)


def keep_dropout(folder: Path, source: str) -> None:
    """Write the dropout of a model's own config into that of a folder to which the model was saved without dropout.

    Args:
        folder: The saved model's; its config may be the part for text of the model's own.
        source: The model's own folder, or its name on the hub.
    """
    written = json.loads((folder / CONFIG_NAME).read_text())
    own = load_config(source)
    if own.model_type != written["model_type"]:
        own = own.get_text_config()
    kept = _with_dropout(written, own.to_dict())
    (folder / CONFIG_NAME).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def _with_dropout(written: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in written.items():
        theirs = own.get(name, value)
        if isinstance(value, dict) and isinstance(theirs, dict):
            kept[name] = _with_dropout(value, theirs)
        else:
            kept[name] = theirs if "drop" in name else value
    return kept


def _local_folder(path: str) -> Path:
    """Return the model's folder; that of its snapshot, with the assets, if it is on the hub."""
    if Path(path).is_dir():
        return Path(path)
    patterns = [*_PATTERNS, f"{_TEMPLATES}/*.jinja"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=[f"*{_INDEX}"]))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ModelError(f"model.path {path}: its config and tokenizer can't be copied: {reason}") from error


def _asset_names(folder: Path) -> list[str]:
    files = [*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja")]
    return sorted(file.relative_to(folder).as_posix() for file in files if _is_asset(file))


def _is_asset(file: Path) -> bool:
    return (
        any(fnmatch(file.name, pattern) for pattern in _PATTERNS)
        and not file.name.endswith(_INDEX)
        and _NAME.fullmatch(file.name) is not None
        and file.is_file()
        and file.stat().st_size <= _MAX_BYTES
    )
