"""Removal of the padding of other trainers' batches: from padded fields to columns.

B rows, P prompt positions, R response positions. Every field of the batch is accounted for in a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rl_core.columns.codec import validate
from rl_core.columns.jagged import Array, token_dtype
from rl_core.padded.coverage import CoverageReport, are_strings, as_list, dtype_name, reject_dense
from rl_core.padded.layouts import Geometry, PaddedField, PaddedLayout, channel_column, derive
from rl_core.padded.nesting import RunLengths, as_mask, cast_exactly, from_padded, host_array
from schemas.catalog import Axis, column_spec
from schemas.errors import ColumnError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Nested:
    """A padded batch without its padding."""

    columns: pa.RecordBatch
    geometry: Geometry
    coverage: CoverageReport


def nest(
    batch: Mapping[str, Any],
    layout: PaddedLayout,
    *,
    vocab_size: int,
    strict: bool = True,
    row_scalars: Mapping[str, str] | None = None,
    token_fields: Mapping[str, str] | None = None,
) -> Nested:
    """Remove the padding of a batch of B rows.

    Args:
        batch: Padded tensors or numpy arrays, and lists of strings, by field name: a dict or a `TensorDict`.
        layout: The layout of the fields.
        vocab_size: An upper bound of the token ids, which determines their dtype.
        strict: Reject a batch with fields that would stay dense. Otherwise the caller keeps them, and the report names
            them.
        row_scalars: Additional fields with one number or string per row, [B], and the row column that each becomes.
            NaN becomes null in a nullable column.
        token_fields: Additional fields with one number per response position, [B, R], and the column on the response
            axis that each becomes, e.g. `{"advantages": "token_advantages"}`.

    Returns:
        Columns that are valid for a store, the geometry for `unnest`, and the report of every field.

    Raises:
        ColumnError: A field would stay dense, doesn't match the layout, can't be rebuilt from the stored columns, or
            has a value that its column can't hold.
    """
    values = dict(batch.items())
    fields = layout.stored_fields(values, row_scalars or {}, token_fields or {})
    known = fields.keys() | layout.masks.keys() | layout.derived.keys() | layout.scalars
    if strict:
        reject_dense({name: value for name, value in values.items() if name not in known}, layout)
    strings = {name for name, entry in fields.items() if entry.dtype == "string"}
    arrays = {name: _numbers(name, values[name]) for name in values if name in known and name not in strings}
    dtypes = {name: dtype_name(values[name]) for name in arrays}
    channels = {name: arrays.pop(name) for name in layout.channels if name in arrays and arrays[name].ndim == 3}
    _check_shapes(arrays, layout, fields)
    exists = _existing(arrays, layout)
    _check_derived(arrays, layout, exists)
    columns = _columns(values, arrays, layout, fields, exists, vocab_size, channels)
    geometry = Geometry(
        runs={axis: RunLengths.from_mask(mask) for axis, mask in exists.items()},
        fields=fields,
        dtypes=dtypes,
        scalars={name: arrays[name].item() for name in arrays.keys() & layout.scalars},
        channels={name: array.shape[1] for name, array in channels.items()},
    )
    return Nested(columns, geometry, CoverageReport.of(values, layout, geometry, columns))


def _check_shapes(arrays: Mapping[str, Array], layout: PaddedLayout, fields: Mapping[str, PaddedField]) -> None:
    shapes = {axis: arrays[name].shape for axis, name in layout.ids.items()}
    if any(len(shape) != 2 for shape in shapes.values()):
        raise ColumnError(
            f"token ids have shapes {', '.join(str(list(s)) for s in shapes.values())}, expected 2-D ones"
        )
    expected = layout.shapes(fields, shapes["prompt"][0], {axis: shape[1] for axis, shape in shapes.items()})
    for name, array in arrays.items():
        if array.shape != expected[name]:
            token_ids = " and ".join(f"{ids!r} {list(arrays[ids].shape)}" for ids in layout.ids.values())
            raise ColumnError(
                f"field {name!r} has shape {list(array.shape)}, expected {list(expected[name])} to match {token_ids}"
            )


def _existing(arrays: Mapping[str, Array], layout: PaddedLayout) -> dict[Axis, Mask]:
    """Return the masks of existing tokens, [B, P] and [B, R]."""
    exists: dict[Axis, Mask] = {}
    for name, axes in layout.masks.items():
        with _naming(name):
            widths = [arrays[layout.ids[axis]].shape[1] for axis in axes]
            exists |= zip(axes, np.split(as_mask(arrays[name]), np.cumsum(widths)[:-1], axis=1), strict=True)
    return {axis: exists[axis] for axis in layout.ids}


def _trained(arrays: Mapping[str, Array], layout: PaddedLayout, exists: Mask) -> Mask:
    """Return the mask of trained response tokens, [B, R], which must exist."""
    name = layout.loss_mask
    if name not in arrays:
        return exists
    with _naming(name):
        trained = as_mask(arrays[name])
    absent = trained & ~exists
    if absent.any() and not layout.fields[name].pad:
        raise ColumnError(
            f"field {name!r} trains {np.count_nonzero(absent)} tokens that are masked by {', '.join(layout.masks)}, "
            f"the first in row {np.argwhere(absent)[0][0]}: trained tokens must exist"
        )
    return trained & exists


def _check_derived(arrays: Mapping[str, Array], layout: PaddedLayout, exists: Mapping[Axis, Mask]) -> None:
    ids = [arrays[name] for name in layout.ids.values()]
    mask = np.concatenate(list(exists.values()), axis=1)
    for name in layout.derived.keys() & arrays.keys():
        rebuilt = derive(layout.derived[name], ids, exists)
        different = np.argwhere((arrays[name] != rebuilt) & mask)
        if different.size:
            row, position = different[0]
            raise ColumnError(
                f"field {name!r} is {arrays[name][row, position]} at row {row}, position {position}, expected "
                f"{rebuilt[row, position]}, its rebuilt value; {len(different)} values differ and would be lost"
            )


def _columns(
    values: Mapping[str, Any],
    arrays: Mapping[str, Array],
    layout: PaddedLayout,
    fields: Mapping[str, PaddedField],
    exists: Mapping[Axis, Mask],
    vocab_size: int,
    channels: Mapping[str, Array],
) -> pa.RecordBatch:
    """Build `loss_mask` and the columns of the stored fields: strings from `values`, numbers from `arrays`."""
    trained = _trained(arrays, layout, exists["response"])
    columns = {"loss_mask": from_padded(trained, exists["response"])}
    for name, entry in fields.items():
        with _naming(name):
            if name not in arrays:
                columns[entry.column] = _string_column(values[name], len(trained))
            elif name != layout.loss_mask:
                columns[entry.column] = _column(arrays[name], entry, exists, trained, vocab_size)
    for name, array in channels.items():
        with _naming(name):
            columns |= _channel_columns(array, layout.channels[name], exists)
    record = pa.record_batch(columns)
    validate(record)
    return record


def _channel_columns(array: Array, stem: str, exists: Mapping[Axis, Mask]) -> dict[str, pa.Array]:
    """Return the columns of a field of several channels, [B, C, P + R]."""
    widths = [mask.shape[1] for mask in exists.values()]
    expected = (len(next(iter(exists.values()))), array.shape[1], sum(widths))
    if array.shape != expected:
        raise ColumnError(f"it has shape {list(array.shape)}, expected {list(expected)}")
    parts = dict(zip(exists, np.split(array, np.cumsum(widths)[:-1], axis=2), strict=True))
    return {
        channel_column(axis, stem, channel): from_padded(part[:, channel], exists[axis], dtype=np.int32)
        for axis, part in parts.items()
        for channel in range(array.shape[1])
    }


def _column(array: Array, entry: PaddedField, exists: Mapping[Axis, Mask], trained: Mask, vocab_size: int) -> pa.Array:
    if entry.dtype == "token":
        ids = array[exists[entry.axis]]
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ColumnError(f"token ids range from {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
        return from_padded(array, exists[entry.axis], dtype=token_dtype(vocab_size))
    spec, dtype = column_spec(entry.column), pa.type_for_alias(entry.dtype).to_pandas_dtype()
    if spec.axis != "row":
        return from_padded(array, exists[entry.axis], dtype=dtype)
    if entry.axis != "row":
        return pa.array(_row_values(cast_exactly(np.where(trained, array, 0), dtype), trained))
    rows = cast_exactly(array, dtype)
    return pa.array(rows, mask=np.isnan(rows) if spec.nullable else None)


def _row_values(values: Array, trained: Mask) -> Array:
    """Return the constant value of each row's trained tokens, [B]; 0 for a row without trained tokens."""
    low = values.min(axis=1, where=trained, initial=np.inf)
    high = values.max(axis=1, where=trained, initial=-np.inf)
    has_trained = trained.any(axis=1)
    different = np.flatnonzero(has_trained & (low != high))
    if different.size:
        row = different[0]
        raise ColumnError(
            f"values are not constant over the trained tokens of row {row}: they range from {low[row]} to {high[row]}; "
            f"{different.size} of {low.size} rows are not constant, but the column has one value per row; declare the "
            "field in token_fields to keep one per token"
        )
    return np.where(has_trained, low, 0).astype(values.dtype)


def _string_column(value: Any, num_rows: int) -> pa.Array:
    strings = as_list(value)
    if len(strings) != num_rows or not are_strings(strings):
        kinds = ", ".join(sorted({type(string).__name__ for string in strings}))
        raise ColumnError(f"{len(strings)} values of type {kinds}, expected {num_rows} of type str")
    return pa.array(strings, pa.string())


def _numbers(name: str, value: Any) -> Array:
    if isinstance(value, torch.Tensor | np.ndarray):
        with _naming(name):
            array = host_array(value)
        if array.dtype.kind in "biuf":
            return array
    raise ColumnError(f"field {name!r} is a {type(value).__name__}, expected a tensor or an array of numbers")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix a column error with the name of the field."""
    try:
        yield
    except ColumnError as error:
        raise ColumnError(f"field {name!r}: {error}") from error
