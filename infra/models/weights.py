"""Fill a model that was built without memory, whole or sharded: each rank reads only the rows that it holds.

Or read its weights one by one, and make of them what a model's folder holds.

Beyond its own shard, a rank needs some MiB at a time; of the experts of a layer that are stored one by one, memory for
those that it holds; of another weight that transformers composes of several stored ones, for that weight as a whole.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from infra.models.files import ModelFiles
from infra.models.lora import new_adapter_weights, without_adapter
from rl_core.training.sharding import local_tensor
from schemas.errors import ModelError

_PIECE_ELEMENTS = 2**20  # read at once

Rows = Callable[[int | None, int | None], Tensor]  # the rows [start, stop) of a tensor, or all of it


def load_weights(
    model: PreTrainedModel, path: str, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[str]:
    """Give a model's parameters memory, and read its weights; new adapters get their initial values.

    Args:
        model: The model with parameters on the meta device, adapted and sharded as in use; its buffers exist.
        path: The model folder, or the model's name on the hub.
        device: The device of the parameters and buffers; `meta` only checks names and shapes, and reads no values but
            those of weights that are stored twice, as they are tied.
        dtype: The dtype of the parameters.
        seed: The seed of new adapters.

    Returns:
        The names of the stored tensors that are no part of the model, e.g. those of an encoder of images.

    Raises:
        ModelError: The folder has no weights that can be read, or they don't cover the model, or not in its shapes; or
            two that should be tied differ.
    """
    with ModelFiles(path, shapes_only=device.type == "meta") as files, torch.no_grad():
        targets = _Targets(model, device, dtype)
        converters, unused = [], list[str]()
        for target, source in _matches(model, files, targets.names, unused):
            if isinstance(source, WeightConverter):
                converters.append((target, source))
            else:
                targets.fill(target, files.shape(source), _rows_of(files, source), files.describe(source), path)
        for target, converter in converters:
            skipped, size = targets.choose_experts(target, converter)
            for name, tensor in _convert(model, target, converter, path).items():
                shape = (size or len(tensor), *tensor.shape[1:]) if tensor.ndim else ()
                targets.fill(name, shape, _rows_in(tensor, skipped), f"{name}, as converted", path)
        for name, value in new_adapter_weights(model, seed):
            targets.fill(without_adapter(name), tuple(value.shape), _rows_in(value), name, path)
        targets.assign(path)
        return unused


class StoredWeights(AbstractContextManager["StoredWeights"]):
    """Reads the weights of a model folder, whole and one at a time, by the names of the model's state dict.

    Args:
        model: The model, on any device, including `meta`, which `load_weights` has found to fit the folder.
        path: The model folder, or the model's name on the hub.

    Raises:
        ModelError: The folder has no weights that can be read.
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self._model, self._path, self._converted = model, path, dict[str, Tensor]()
        self._state = model.state_dict(keep_vars=True)
        own = dict.fromkeys(self._state, "")
        with ModelFiles(path, shapes_only=True) as shapes:
            matches = list(_matches(model, shapes, own, []))
            self._made_of = {
                name: target
                for target, source in matches
                for name in ([target] if isinstance(source, str) else _convert(model, target, source, path))
            }
        self._files = ModelFiles(path)
        self._sources = dict(_matches(model, self._files, own, []))

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def read(self, name: str) -> Tensor:
        """Read a weight in float32, or a buffer in its own dtype, on the CPU; once, if it is made of several tensors.

        Of tied weights, the folder may have any.

        Raises:
            ModelError: A file can't be read.
        """
        old = self._state[name]
        same = next(other for other, tied in self._state.items() if tied is old and other in self._made_of)
        source = self._sources[self._made_of[same]]
        if isinstance(source, str):
            value = self._files.read_values(source)
        else:
            if same not in self._converted:
                self._converted |= _convert(self._model, self._made_of[same], source, self._path)
            value = self._converted.pop(same)
        return value.to(torch.float32 if isinstance(old, nn.Parameter) and old.is_floating_point() else old.dtype)


def stored_tensors(
    model: PreTrainedModel, names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors that a folder of the model holds, as transformers saves it, made of a few weights at a time.

    Args:
        model: A model that was built of its config.
        names: Those of its weights that are saved, by the state dict; tied ones once.
        read: Returns a weight; called once for each.
    """
    table = [
        each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
    ]
    reverse = [each.reverse_transform() for each in reversed(table)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, WeightConverter | Callable[[], Tensor]] = {}
    for name in sorted(names, key=dot_natural_key) if table else names:
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        value: Any = partial(read, name)  # called by the conversion, not now
        if pattern is None:
            sources[target] = value
        else:
            converter = sources.setdefault(target, deepcopy(by_pattern[pattern]))
            assert isinstance(converter, WeightConverter)
            converter.add_tensor(target, name, pattern, value)
    for target, source in sources.items():
        if isinstance(source, WeightConverter):
            yield _convert(model, target, source, str(model.name_or_path))
        else:
            yield {target: source()}


class _Targets:
    """The parameters and persistent buffers of a model, each to be filled once; tied ones share their memory.

    Buffers keep their dtype: routers' biases, which decide between experts by small differences, are stored in float32
    next to weights in bfloat16.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._state = model.state_dict(keep_vars=True)
        self.names = {without_adapter(name): name for name in self._state}
        self._new: dict[int, Tensor] = {}  # by the id of what they replace
        self._sources: dict[int, tuple[str, Rows]] = {}  # of the same

    def fill(self, target: str, shape: tuple[int, ...], rows: Rows, source: str, path: str) -> None:
        """Fill this rank's rows of a weight; a second value of a tied weight must be the same."""
        old = self._state[self.names[target]]
        if shape != tuple(old.shape):
            raise ModelError(
                f"model.path {path}: {source} has shape {list(shape)}, but {target} of {type(self._model).__name__} "
                f"has {list(old.shape)}; do config.json and weights belong together?"
            )
        start, size = _held_rows(old) if isinstance(old, DTensor) else (0, shape[0] if shape else 1)
        if (filled := self._new.get(id(old))) is not None:
            first, first_rows = self._sources[id(old)]
            if not _agree(local_tensor(filled), first_rows, rows, start):
                raise ModelError(
                    f"model.path {path}: {source} differs from {first}, which {target} of {type(self._model).__name__}"
                    " is tied to; if both are meant, set tie_word_embeddings to false in the folder's config.json, else"
                    " remove one of them"
                )
            return
        self._sources[id(old)] = source, rows
        is_weight = isinstance(old, nn.Parameter) and old.is_floating_point()
        local = self._copy(rows, start, (size, *shape[1:]) if shape else (), self._dtype if is_weight else old.dtype)
        if not isinstance(old, DTensor):
            self._new[id(old)] = _like(old, local)
            return
        placed = DTensor.from_local(
            local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
        self._new[id(old)] = _like(old, placed)

    def choose_experts(self, target: str, converter: WeightConverter) -> tuple[int, int | None]:
        """Have a converter that stacks experts read those alone that this rank holds, at least one.

        Returns:
            The number of experts before them, and of all; 0 and None: it reads whatever it makes a weight of.
        """
        old, (first, *others) = self._state[self.names[target]], converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        read = converter.collected_tensors
        if (
            not (isinstance(old, DTensor) and stacks)
            or any(not isinstance(other, Concatenate) or other.dim == 0 for other in others)
            or any(len(experts) != len(old) for experts in read.values())
        ):
            return 0, None
        start, size = _held_rows(old)
        start = min(start, len(old) - 1)
        for pattern, experts in read.items():
            read[pattern] = experts[start : start + max(size, 1)]
        return start, len(old)

    def _copy(self, rows: Rows, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape with the rows from `start` on, which are read piece by piece."""
        values = torch.empty(shape, dtype=dtype, device=self._device)
        if values.is_meta:
            return values
        if not shape:
            return values.copy_(rows(None, None))
        step = max(1, _PIECE_ELEMENTS // max(1, math.prod(shape[1:])))
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            values[first:last].copy_(rows(start + first, start + last))
        return values

    def assign(self, path: str) -> None:
        """Put the values into the model, and move the other buffers to the device."""
        missing = sorted(name for name, old in self._state.items() if id(old) not in self._new)
        if missing:
            raise ModelError(
                f"model.path {path}: {len(missing)} of the model's weights are not in the folder and would be random, "
                f"e.g. {missing[0]}; does its config.json belong to another model?"
            )
        values = {name: self._new[id(old)] for name, old in self._state.items()}
        self._model.load_state_dict(values, assign=True)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))


def _agree(filled: Tensor, source: Rows, rows: Rows, start: int) -> bool:
    """Return whether `rows`, from `start` on, are the values of a tensor, as far as this rank holds them.

    Without values of the tensor, `filled`, those of its `source` are compared.
    """
    step = max(1, _PIECE_ELEMENTS // max(1, math.prod(filled.shape[1:])))
    for first in range(0, len(filled), step):
        last = min(first + step, len(filled))
        own = source(start + first, start + last).to(filled.dtype) if filled.is_meta else filled[first:last]
        other = rows(start + first, start + last)
        if own.is_meta or other.is_meta:  # of several stored tensors
            return True
        if not torch.equal(own, other.to(own)):
            return False
    return True


def _like(old: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value


def _held_rows(sharded: DTensor) -> tuple[int, int]:
    """Return the first row that this rank holds of a tensor, and their number; FSDP shards along the first axis."""
    start, size = 0, sharded.shape[0]
    mesh = sharded.device_mesh
    for axis, placement in enumerate(sharded.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            size, offset = Shard.local_shard_size_and_offset(size, mesh.size(axis), mesh.get_local_rank(axis))
            start += offset
    return start, size


def _matches(
    model: PreTrainedModel, files: ModelFiles, own: dict[str, str], unused: list[str]
) -> Iterator[tuple[str, str | WeightConverter]]:
    """Yield the model's weights with the stored tensor of each, or with the converter that makes it of several.

    Names are matched as transformers does: by its table for the model's class. Converters come last. The names of
    stored tensors that are no part of the model are added to `unused`.
    """
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    composed: dict[str, WeightConverter] = {}
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if target not in own:
            if not name.endswith("inv_freq"):  # older folders store what is computed
                unused.append(name)
        elif pattern is None:
            yield target, name
        else:
            converter = composed.setdefault(target, deepcopy(by_pattern[pattern]))
            read: Any = partial(files.read, name)  # called by the conversion, not now
            converter.add_tensor(target, name, pattern, read)
    yield from composed.items()


def _convert(model: PreTrainedModel, target: str, converter: WeightConverter, path: str) -> dict[str, Tensor]:
    """Return the tensors that a converter makes of those that it was given, by name."""
    try:
        values: dict[str, Any] = converter.convert(target, model=model, config=model.config)
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"model.path {path}: the model can't be loaded: {target} can't be made of the stored tensors: {error}"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


def _rows_of(files: ModelFiles, name: str) -> Rows:
    return lambda start, stop: files.read_values(name, start, stop)


def _rows_in(tensor: Tensor, skipped: int = 0) -> Rows:
    """Return what reads rows of a tensor, which lacks the `skipped` first ones."""

    def rows(start: int | None, stop: int | None) -> Tensor:
        return tensor if start is None or stop is None else tensor[start - skipped : stop - skipped]

    return rows
