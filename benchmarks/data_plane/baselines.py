"""The baselines, each used on this batch as its users would use it.

Padded baselines carry the columns as padded trainers hold them: int64 ids, an int64 attention mask over prompt and
response, an int64 loss mask, float32, and text as lists of str, but no `input_ids` or position ids, which their users
often add. Consumers compute the indices of the valid values once per axis and gather every column with them, like
flash-attention's `unpad_input`. `ray_padded_lean` is the best case of padding, leaner than in practice: a bool mask,
and lengths from which the indices are computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import ray
import torch

from benchmarks.data_plane.batch import (
    APPENDED,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    Ints,
    Packed,
    ReferenceBatch,
    pack_columns,
)
from benchmarks.data_plane.paths import DataPath, Refs
from rl_core.columns.jagged import flat_values, row_lengths
from schemas.catalog import column_spec

WIDTHS = {"prompt": MAX_PROMPT_TOKENS, "response": MAX_RESPONSE_TOKENS}
NEW_COLUMN = "appended_logprobs"
ATTENTION_MASK = "attention_mask"
MASKS = (ATTENTION_MASK, "prompt_lengths", "response_lengths")  # columns that mark the valid values

Padded = dict[str, Any]  # tensors [N, width] or [N], and lists of N strings


class RayPadded(DataPath):
    """Padded tensors as NumPy arrays, which Ray stores outside the pickle and maps without a copy."""

    name = "ray_padded"
    lean = False

    def prepare(self, batch: ReferenceBatch) -> None:
        columns, appended = pad_batch(batch, lean=self.lean)
        self.num_bytes = payload_bytes(columns)
        self._columns = {name: _as_numpy(value) for name, value in columns.items()}
        self._appended = _as_numpy(appended[NEW_COLUMN])

    def put(self, step: int) -> Refs:
        return {"columns": ray.put(self._columns)}

    def append(self, step: int, handle: Refs) -> Refs:
        return {**handle, NEW_COLUMN: ray.put(self._appended)}

    def fetch(self, handle: Refs, order: Ints | None) -> Padded:
        arrays = ray.get(handle["columns"])
        return {
            name: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()
        }

    def pack(self, fetched: Padded, order: Ints | None) -> Packed:
        return pack_padded(fetched, order)

    def fetch_appended(self, handle: Refs) -> Packed:
        masks = {name: value for name, value in self.fetch(handle, None).items() if name in MASKS}
        return pack_padded({APPENDED: torch.as_tensor(ray.get(handle[NEW_COLUMN])), **masks})


class RayPaddedLean(RayPadded):
    """The leanest padded batch: a bool loss mask, and row lengths instead of an attention mask."""

    name = "ray_padded_lean"
    lean = True


class TransferQueue(DataPath):
    """Jagged nested tensors through TransferQueue's SimpleStorage in its default configuration.

    That is a controller and two storage units, used by the client's own `put` and `get_data` with a BatchMeta as the
    handle: on this batch, reads by key take up to twice as long, because they query the controller again.
    """

    name = "transfer_queue"
    units: ClassVar[int] = 2

    def prepare(self, batch: ReferenceBatch) -> None:
        import transfer_queue
        from omegaconf import OmegaConf

        storage = {"num_data_storage_units": self.units}
        transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": storage}}))
        self._client = transfer_queue.get_client()
        columns, appended = self._containers(batch)
        self.num_bytes = payload_bytes(columns)
        self._columns, self._appended = (_tensordict(part, batch.columns.num_rows) for part in (columns, appended))

    def connect(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def put(self, step: int) -> Any:
        return self._client.put(self._columns, partition_id=self._partition(step))

    def append(self, step: int, handle: Any) -> Any:
        return self._client.put(self._appended, metadata=handle)

    def fetch(self, handle: Any, order: Ints | None) -> Any:
        return self._client.get_data(handle if order is None else handle.select_samples(order.tolist()))

    def clear(self, step: int, handle: Any) -> None:
        self._client.clear_partition(self._partition(step))

    def close(self) -> None:
        import transfer_queue

        transfer_queue.close()

    def _partition(self, step: int) -> str:
        return f"{self.name}-{step}"

    def _containers(self, batch: ReferenceBatch) -> tuple[Padded, Padded]:
        source = pack_columns(batch.columns)
        columns = {name: _nested(*pair) for name, pair in source.tokens.items()}
        appended = _nested(*pack_columns(batch.appended).tokens[APPENDED])
        return {**columns, **source.rows, **source.strings}, {NEW_COLUMN: appended}

    def pack(self, fetched: Any, order: Ints | None) -> Packed:
        columns = dict(fetched.items())
        nested = {name: value for name, value in columns.items() if isinstance(value, torch.Tensor) and value.is_nested}
        return Packed(
            tokens={name: _flat(value) for name, value in nested.items()},
            rows={"advantages": columns["advantages"]},
            strings={name: columns[name].tolist() for name in ("prompt_text", "response_text")},
        )

    def fetch_appended(self, handle: Any) -> Packed:
        nested = self._client.get_data(handle.select_fields([NEW_COLUMN]))[NEW_COLUMN]
        return Packed({APPENDED: _flat(nested)}, {}, {})


def pad_batch(batch: ReferenceBatch, *, lean: bool) -> tuple[Padded, Padded]:
    """Return the batch's columns padded, with those that mark the valid values, and the appended column."""
    source = pack_columns(batch.columns)
    columns: Padded = {name: _pad(name, *pair) for name, pair in source.tokens.items()}
    lengths = {axis: torch.from_numpy(getattr(batch, f"{axis}_lengths")) for axis in WIDTHS}
    if lean:
        columns |= {f"{axis}_lengths": lengths[axis] for axis in WIDTHS}
    else:
        columns["loss_mask"] = columns["loss_mask"].long()
        exists = [torch.arange(width) < lengths[axis][:, None] for axis, width in WIDTHS.items()]
        columns[ATTENTION_MASK] = torch.cat(exists, dim=1).long()
    appended = torch.from_numpy(np.array(flat_values(batch.appended.column(APPENDED))))
    lengths = torch.from_numpy(row_lengths(batch.appended.column(APPENDED)))
    return {**columns, **source.rows, **source.strings}, {NEW_COLUMN: _pad(APPENDED, appended, lengths)}


def pack_padded(columns: Padded, order: Ints | None = None) -> Packed:
    """Gather the valid values of padded columns, with rows in `order` if it is given."""
    if order is not None:
        columns = {name: _rows(value, order) for name, value in columns.items()}
    lengths, indices = _valid_indices(columns)
    tokens: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    rows: dict[str, torch.Tensor] = {}
    strings: dict[str, Sequence[Any]] = {}
    for name, value in columns.items():
        if isinstance(value, list):
            strings[name] = value
        elif name in MASKS:
            continue
        elif value.ndim == 2:
            axis = column_spec(name).axis
            tokens[name] = (value.flatten().index_select(0, indices[axis]), lengths[axis])
        else:
            rows[name] = value
    return Packed(tokens, rows, strings)


def _valid_indices(columns: Padded) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the row lengths [N], and the flat indices [V] of the valid values in a padded column, by axis."""
    if ATTENTION_MASK in columns:
        masks = torch.split(columns[ATTENTION_MASK], list(WIDTHS.values()), dim=1)
        by_axis = dict(zip(WIDTHS, masks, strict=True))
        indices = {axis: torch.nonzero(mask.flatten()).flatten() for axis, mask in by_axis.items()}
        return {axis: mask.sum(dim=1) for axis, mask in by_axis.items()}, indices
    lengths = {axis: columns[f"{axis}_lengths"] for axis in WIDTHS}
    return lengths, {axis: _indices_from_lengths(lengths[axis], width) for axis, width in WIDTHS.items()}


def payload_bytes(columns: Mapping[str, Any]) -> int:
    """Return the bytes of tensors and strings, without serialization overhead."""
    return sum(_num_bytes(value) for value in columns.values())


def _num_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(len(string.encode()) for string in value)
    flat = value.values() if value.is_nested else value
    return int(flat.numel() * flat.element_size())


def _pad(name: str, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    width = WIDTHS[column_spec(name).axis]
    dtype = torch.int64 if values.dtype == torch.int32 else values.dtype
    rectangle = torch.zeros(lengths.numel(), width, dtype=dtype)
    rectangle[torch.arange(width) < lengths[:, None]] = values.to(dtype)
    return rectangle


def _indices_from_lengths(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return the flat indices [V] of the valid values in a padded column; cheaper than a mask's `nonzero`."""
    starts = torch.cumsum(lengths, 0) - lengths
    shifts = torch.arange(lengths.numel()) * width - starts
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shifts, lengths)


def _rows(value: Any, order: Ints) -> Any:
    if isinstance(value, list):
        return [value[row] for row in order.tolist()]
    return value.index_select(0, torch.from_numpy(order))


def _nested(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(torch.split(values, lengths.tolist())), layout=torch.jagged)


def _flat(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return nested.values(), nested.offsets().diff()


def _tensordict(columns: Padded, num_rows: int) -> Any:
    from tensordict import NonTensorStack, TensorDict

    fields = {
        name: NonTensorStack.from_list(value) if isinstance(value, list) else value for name, value in columns.items()
    }
    return TensorDict(fields, batch_size=[num_rows])


def _as_numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value
