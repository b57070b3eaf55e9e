"""The safetensors files of a model folder: which tensor is in which file, and slices of them."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_128

from schemas.errors import ModelError, describe

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAPPED_BYTES = 2**22  # a file is mapped again after so many bytes: pages that were read count as this process's memory
_SPANS, _SPAN_BYTES = 16, 2**16  # of each file, a digest reads so many spans of this size: at most 1 MiB

logger = logging.getLogger(__name__)


def weights_digest(path: str) -> str:
    """Return a digest of a folder's config and weights; empty: there is no such folder, as of a model on the hub.

    Of each file it has the name, the size and some spans, first and last bytes included: other weights differ in them,
    and a large model on a network file system is read in seconds.
    """
    digest = xxh3_128()
    files = [file for pattern in ("config.json", "*.safetensors", INDEX) for file in sorted(Path(path).glob(pattern))]
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for number in range(_SPANS):
                content.seek(max(size - _SPAN_BYTES, 0) * number // (_SPANS - 1))
                digest.update(content.read(_SPAN_BYTES))
    return digest.hexdigest() if files else ""


class _Index(BaseModel):
    """The index of a model of several files, as transformers writes it."""

    weight_map: dict[str, str]  # tensor name -> file


def check_hub_weights(name: str, *, is_here: bool) -> None:
    """Check that the cache or the hub has a model's weights, which aren't downloaded.

    Args:
        name: The model's.
        is_here: Whether this machine loads them: else, if the hub can't be reached, that is only warned of.

    Raises:
        ModelError: The model has no safetensors files; or they are not in the cache, and the hub can't be reached.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in (INDEX, SINGLE)):
        return  # without a network, asking for the other one takes a while
    lost: OSError | None = None
    for file in (INDEX, SINGLE):
        try:
            hf_hub_download(name, file, dry_run=True)
        except LocalEntryNotFoundError as error:
            lost = error
        except EntryNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"model.path {name}: {file} can't be downloaded: {error}") from error
        else:
            return
    if lost is None:
        raise _without_weights(name)
    if is_here:
        raise _unreachable(name, lost)
    logger.warning("%s; the nodes that load them may have them", _unreachable(name, lost))


class ModelFiles(AbstractContextManager["ModelFiles"]):
    """Reads tensors of a model folder, or of a model on the hub, by slices. Nothing is unpickled.

    Args:
        path: The folder, or the model's name on the hub.
        shapes_only: `read` reads no values: tensors are on the meta device.

    Attributes:
        names: The names of all tensors.

    Raises:
        ModelError: The model has no safetensors files, or one is missing or unreadable; or it is not in the cache, and
            the hub can't be reached.
    """

    def __init__(self, path: str, *, shapes_only: bool = False) -> None:
        self._path, self._shapes_only = path, shapes_only
        self._open_file: Path | None = None
        self._reader: Any = None
        self._num_read = 0
        self._lost: OSError | None = None  # why the hub can't be asked for a file that is not in the cache
        self._files = self._index()
        self.names = list(self._files)

    def __exit__(self, *_: object) -> None:
        self._close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Read a tensor in the file's dtype, or its rows [start, stop); without values if only shapes are asked for."""
        if not self._shapes_only:
            return self.read_values(name, start, stop)
        empty = torch.empty(self._slice(name).get_shape(), device="meta")
        return empty if start is None else empty[start:stop]

    def read_values(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Read a tensor in the file's dtype, or its rows [start, stop), even if only shapes are asked for."""
        part = self._slice(name)
        tensor: Tensor = part[...] if start is None else part[start:stop]
        self._num_read += tensor.nbytes
        return tensor

    def describe(self, name: str) -> str:
        """Return the tensor's name and its file, for messages."""
        return f"{name} in {self._files[name].name}"

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file != self._open_file or self._num_read > _MAPPED_BYTES:
            self._close()
            self._reader, self._open_file, self._num_read = self._open(file), file, 0
        try:
            return self._reader.get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"model.path {self._path}: {self.describe(name)} can't be read: {error}") from None

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt").__enter__()
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"model.path {self._path}: {file.name} can't be read: {error}; copy or download the file again"
            ) from None

    def _close(self) -> None:
        reader, self._reader, self._open_file = self._reader, None, None
        if reader is not None:
            reader.__exit__(None, None, None)

    def _index(self) -> dict[str, Path]:
        """Return the file of each tensor."""
        if (index := self._find(INDEX)) is None:
            if (single := self._find(SINGLE)) is None:
                raise self._missing() or _without_weights(self._path)
            return dict.fromkeys(self._names_in(single), single)
        try:
            names = _Index.model_validate_json(index.read_text()).weight_map
        except (ValueError, OSError) as error:
            raise ModelError(
                f"model.path {self._path}: {index} is not an index of safetensors files: {describe(error)}"
            ) from None
        if outside := [file for file in names.values() if Path(file).name != file]:
            raise ModelError(
                f"model.path {self._path}: {index.name} names {outside[0]!r}, which is not a file of the same folder"
            )
        files = {file: self._find(file) for file in sorted(set(names.values()))}
        if missing := [file for file, found in files.items() if found is None]:
            raise self._missing() or ModelError(
                f"model.path {self._path}: {index.name} names {missing[0]}, which is missing; copy it there"
            )
        found = {file: path for file, path in files.items() if path is not None}
        held = {file: set(self._names_in(path)) for file, path in found.items()}
        for name, file in names.items():
            if name not in held[file]:
                raise ModelError(f"model.path {self._path}: {index.name} places {name} in {file}, which lacks it")
        return {name: found[file] for name, file in names.items()}

    def _names_in(self, file: Path) -> Iterator[str]:
        reader = self._open(file)
        try:
            yield from reader.keys()
        finally:
            reader.__exit__(None, None, None)

    def _find(self, name: str) -> Path | None:
        """Return a file's local path; None if there is no such file, see `_lost`. Files on the hub are downloaded."""
        if Path(self._path).is_dir():
            path = Path(self._path, name)
            return path if path.exists() else None
        try:
            return Path(hf_hub_download(self._path, name))
        except LocalEntryNotFoundError as error:  # a kind of the next one, but the hub may have the file
            self._lost = error
            return None
        except EntryNotFoundError:
            return None
        except OSError as error:
            raise ModelError(f"model.path {self._path}: {name} can't be downloaded: {error}") from error

    def _missing(self) -> ModelError | None:
        """Return the error of files that couldn't be asked for; None if the model doesn't have them."""
        return None if self._lost is None else _unreachable(self._path, self._lost)


def _unreachable(name: str, error: OSError) -> ModelError:
    return ModelError(
        f"model.path {name}: its weights are not all in the cache, and the hub can't be reached "
        f"({describe(error.__cause__ or error)}); download them where there is a network: hf download {name}"
    )


def _without_weights(path: str) -> ModelError:
    pickled = Path(path).is_dir() and [*Path(path).glob("*.bin"), *Path(path).glob("*.pt*")]
    if not pickled:
        return ModelError(
            f"model.path {path}: the model can't be loaded: neither {SINGLE} nor {INDEX} is there; save the "
            "model with `model.save_pretrained(folder)`"
        )
    return ModelError(
        f"model.path {path}: the model can't be loaded: its weights are only in {pickled[0].name}, a pickle, "
        "which may run any code and is never read; convert a folder that you trust: `AutoModelForCausalLM"
        f".from_pretrained({path!r}, use_safetensors=False).save_pretrained(folder)`"
    )
