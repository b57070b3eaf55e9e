"""Policy checkpoints: an ordinary Hugging Face folder, the optimizer's state beside it, and a manifest last.

`policy/step-000012/` holds the weights of policy version 12. A folder without a manifest, or whose files differ
from it, is not a checkpoint. Nothing is pickled: tensors are safetensors, the rest is JSON.
"""

import logging
import os
import re
import shutil
import zlib
from pathlib import Path

import torch
from pydantic import NonNegativeInt
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.runs import write_atomic
from schemas.base import Frozen
from schemas.errors import CheckpointError
from schemas.step import UpdateReport

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.safetensors"
RNG_KEY = "rng/torch"


class FileEntry(Frozen):
    """One file of a checkpoint."""

    num_bytes: NonNegativeInt
    crc32: NonNegativeInt


class Manifest(Frozen):
    """What a complete checkpoint holds; written last."""

    version: NonNegativeInt  # policy version, and so the number of steps done: the data cursor
    num_updates: NonNegativeInt  # optimizer steps so far
    report: UpdateReport | None  # of the step that led to this version; None for the starting weights
    files: dict[str, FileEntry]


def checkpoint_path(directory: Path, version: int) -> Path:
    """Where the checkpoint of one policy version lies."""
    return directory / f"step-{version:06d}"


def save_checkpoint(
    directory: Path,
    *,
    version: int,
    num_updates: int,
    report: UpdateReport | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    keep_last: int,
) -> Path:
    """Write the checkpoint of `version`, then drop all but the newest `keep_last`."""
    path = checkpoint_path(directory, version)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    save_file(_trainer_tensors(model, optimizer), path / TRAINER_STATE)
    files = {file.name: _entry(file, sync=True) for file in sorted(path.iterdir())}
    manifest = Manifest(version=version, num_updates=num_updates, report=report, files=files)
    write_atomic(path / MANIFEST, manifest.model_dump_json(indent=2))
    for old in complete_versions(directory)[:-keep_last]:
        shutil.rmtree(checkpoint_path(directory, old))
    return path


def complete_versions(directory: Path) -> list[int]:
    """The versions that have a manifest, oldest first."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in directory.glob(f"step-*/{MANIFEST}"))
    return sorted(int(match.group(1)) for match in found if match)


def newest_checkpoint(directory: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose files are as its manifest says; None if there is none.

    A damaged one is skipped with a warning that names it.
    """
    for version in reversed(complete_versions(directory)):
        path = checkpoint_path(directory, version)
        try:
            return path, read_manifest(path)
        except CheckpointError as error:
            logger.warning("skipped a damaged checkpoint: %s", error)
    return None


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest and check every file against it.

    Raises:
        CheckpointError: The manifest is unreadable, or a file is missing or differs.
    """
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is not a manifest: {error}") from None
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (actual := _entry(file)) != expected:
            raise CheckpointError(f"{file} differs from its manifest: {actual} instead of {expected}")
    return manifest


def load_trainer_state(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's optimizer state and torch's random state back."""
    tensors = load_file(path / TRAINER_STATE)
    torch.set_rng_state(tensors.pop(RNG_KEY))
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        slot, name = key.split("/", 1)
        optimizer.state[parameters[name]][slot] = tensor


def _trainer_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {RNG_KEY: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{slot}/{name}"] = torch.as_tensor(value).contiguous()
    return tensors


def _entry(path: Path, *, sync: bool = False) -> FileEntry:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        crc = num_bytes = 0
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
            num_bytes += len(block)
    return FileEntry(num_bytes=num_bytes, crc32=crc)
