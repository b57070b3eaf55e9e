"""Other trainers' padded batches to record batches of catalogue columns, and back.

B rows, P prompt positions, R response positions. `nest` keeps what exists, accounts for every field of the batch in
a report, and refuses what would stay padded; `unnest` gives the padded batch again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rl_core.columns.codec import validate
from rl_core.columns.jagged import Array, as_tensor, row_lengths, token_dtype
from rl_core.padded.coverage import CoverageReport, are_texts, dtype_name, listed, refuse_dense
from rl_core.padded.layouts import PaddedField, PaddedLayout, Rule, require_names
from rl_core.padded.nesting import RunLengths, as_mask, cast_exactly, from_padded, host_array, to_padded_at
from schemas.catalog import Axis, column_spec
from schemas.errors import ColumnError

Mask = npt.NDArray[np.bool_]

_TRAINER_DTYPES = {"token": "int64", "bool": "int64", "int32": "int64", "float": "float32"}


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the way back needs besides the columns."""

    runs: Mapping[Axis, RunLengths]  # what existed where, and the widths
    fields: Mapping[str, PaddedField]  # those that were stored
    dtypes: Mapping[str, str]  # torch's names, for the fields that are tensors
    scalars: Mapping[str, float]

    @classmethod
    def canonical(cls, columns: pa.RecordBatch, layout: PaddedLayout, widths: Mapping[Axis, int]) -> Geometry:
        """The geometry of columns that were never padded: the layout's sides, and the widths that the caller states.

        Raises:
            ColumnError: A row is longer than its width, or a column of token ids is missing.
        """
        ids = {axis: layout.fields[name].column for axis, name in layout.ids.items()}
        require_names(columns.schema.names, list(ids.values()), "the columns lack")
        lengths = {axis: row_lengths(columns.column(column)) for axis, column in ids.items()}
        return cls(
            runs={axis: RunLengths.from_lengths(lengths[axis], widths[axis], layout.sides[axis]) for axis in ids},
            fields={name: entry for name, entry in layout.fields.items() if entry.column in columns.schema.names},
            dtypes=dict.fromkeys([*layout.masks, *layout.derived], "int64"),
            scalars={},
        )


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
) -> Nested:
    """Take the padding off a batch of B rows.

    Args:
        batch: Padded tensors or numpy arrays, and lists of text, by field name: a dict or a `TensorDict`.
        layout: What the fields are.
        vocab_size: Every token id is below it; it decides the ids' dtype.
        strict: Refuse a batch with fields that would stay dense. Otherwise they are the caller's to keep, and
            the report names them.
        row_scalars: More fields with one number or text per row, [B], and the row column that each becomes. NaN
            becomes null in a nullable column.

    Returns:
        Columns that are valid for a store, what the way back needs, and the report of every field.

    Raises:
        ColumnError: A field would stay dense, is not as the layout says, can't be rebuilt from what is stored, or
            holds a value that its column can't.
    """
    values = dict(batch.items())
    fields = layout.stored_fields(values, row_scalars or {})
    known = fields.keys() | layout.masks.keys() | layout.derived.keys() | layout.scalars
    if strict:
        refuse_dense({name: value for name, value in values.items() if name not in known}, layout)
    texts = {name for name, entry in fields.items() if entry.dtype == "string"}
    arrays = {name: _numbers(name, values[name]) for name in values if name in known and name not in texts}
    _check_shapes(arrays, layout, fields)
    exists = _existing(arrays, layout)
    _check_derived(arrays, layout, exists)
    columns = _columns(values, arrays, layout, fields, exists, vocab_size)
    geometry = Geometry(
        runs={axis: RunLengths.from_mask(mask) for axis, mask in exists.items()},
        fields=fields,
        dtypes={name: dtype_name(values[name]) for name in arrays},
        scalars={name: arrays[name].item() for name in arrays.keys() & layout.scalars},
    )
    return Nested(columns, geometry, CoverageReport.of(values, layout, fields, geometry.runs, columns))


def unnest(columns: pa.RecordBatch, layout: PaddedLayout, geometry: Geometry, pad_token_id: int) -> dict[str, Any]:
    """Give the padded batch again.

    Args:
        columns: What `nest` returned. Columns added since become fields too, where the layout has one for them.
        layout: The layout that the batch was nested with.
        geometry: What `nest` returned, or `Geometry.canonical`.
        pad_token_id: The token id where nothing exists.

    Returns:
        The fields that the batch had, except dense ones: CPU tensors of the same shapes and dtypes, and lists of
        text. They equal the originals wherever the token exists, and hold the layout's pad elsewhere; repeated
        values equal them wherever the token is trained.

    Raises:
        ColumnError: A column is missing or not as declared, or its rows are not those of the geometry.
    """
    fields = _all_fields(columns.schema.names, layout, geometry)
    validate(columns, {axis: runs.lengths for axis, runs in geometry.runs.items()})
    exists = {axis: runs.to_mask() for axis, runs in geometry.runs.items()}
    batch = _padded_fields(columns, fields, geometry, pad_token_id)
    ids = [batch[name].numpy() for name in layout.ids.values()]
    for name, axes in layout.masks.items():
        batch[name] = torch.from_numpy(np.concatenate([exists[axis] for axis in axes], axis=1))
    for name in layout.derived.keys() & geometry.dtypes.keys():
        batch[name] = torch.from_numpy(_derive(layout.derived[name], ids, exists))
    batch |= {name: torch.tensor(value) for name, value in geometry.scalars.items()}
    dtypes = {name: _TRAINER_DTYPES.get(entry.dtype, "") for name, entry in fields.items()} | dict(geometry.dtypes)
    return {
        name: value.to(getattr(torch, dtypes[name])) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _check_shapes(arrays: Mapping[str, Array], layout: PaddedLayout, fields: Mapping[str, PaddedField]) -> None:
    shapes = {axis: arrays[name].shape for axis, name in layout.ids.items()}
    if any(len(shape) != 2 for shape in shapes.values()):
        raise ColumnError(
            f"token ids have shapes {', '.join(str(list(s)) for s in shapes.values())}, expected 2-D ones"
        )
    expected = layout.shapes(fields, shapes["prompt"][0], {axis: shape[1] for axis, shape in shapes.items()})
    for name, array in arrays.items():
        if array.shape != expected[name]:
            beside = " and ".join(f"{ids!r} {list(arrays[ids].shape)}" for ids in layout.ids.values())
            raise ColumnError(
                f"field {name!r} has shape {list(array.shape)}, expected {list(expected[name])} beside {beside}"
            )


def _existing(arrays: Mapping[str, Array], layout: PaddedLayout) -> dict[Axis, Mask]:
    """Which tokens exist on each axis, [B, P] and [B, R]."""
    exists: dict[Axis, Mask] = {}
    for name, axes in layout.masks.items():
        with _about(name):
            widths = [arrays[layout.ids[axis]].shape[1] for axis in axes]
            exists |= zip(axes, np.split(as_mask(arrays[name]), np.cumsum(widths)[:-1], axis=1), strict=True)
    return {axis: exists[axis] for axis in layout.ids}


def _trained(arrays: Mapping[str, Array], layout: PaddedLayout, exists: Mask) -> Mask:
    """Which response tokens are trained, [B, R]: none that does not exist."""
    name = layout.loss_mask
    if name not in arrays:
        return exists
    with _about(name):
        trained = as_mask(arrays[name])
    absent = trained & ~exists
    if absent.any() and not layout.fields[name].pad:
        raise ColumnError(
            f"field {name!r} trains {np.count_nonzero(absent)} tokens that do not exist by {', '.join(layout.masks)}, "
            f"the first in row {np.argwhere(absent)[0][0]}: what is trained must exist"
        )
    return trained & exists


def _derive(rule: Rule, ids: Sequence[Array], exists: Mapping[Axis, Mask]) -> Array:
    if rule == "tokens":
        return np.concatenate(ids, axis=1)
    return np.clip(np.cumsum(np.concatenate(list(exists.values()), axis=1), axis=1) - 1, 0, None)


def _check_derived(arrays: Mapping[str, Array], layout: PaddedLayout, exists: Mapping[Axis, Mask]) -> None:
    ids = [arrays[name] for name in layout.ids.values()]
    mask = np.concatenate(list(exists.values()), axis=1)
    for name in layout.derived.keys() & arrays.keys():
        rebuilt = _derive(layout.derived[name], ids, exists)
        different = np.argwhere((arrays[name] != rebuilt) & mask)
        if different.size:
            row, position = different[0]
            raise ColumnError(
                f"field {name!r} is {arrays[name][row, position]} at row {row}, position {position}, expected "
                f"{rebuilt[row, position]} as it would be rebuilt; {len(different)} values differ and would be lost"
            )


def _columns(
    values: Mapping[str, Any],
    arrays: Mapping[str, Array],
    layout: PaddedLayout,
    fields: Mapping[str, PaddedField],
    exists: Mapping[Axis, Mask],
    vocab_size: int,
) -> pa.RecordBatch:
    """The columns of the stored fields, texts from `values` and numbers from `arrays`, and always `loss_mask`."""
    trained = _trained(arrays, layout, exists["response"])
    columns = {"loss_mask": from_padded(trained, exists["response"])}
    for name, entry in fields.items():
        with _about(name):
            if name not in arrays:
                columns[entry.column] = _text_column(values[name], len(trained))
            elif name != layout.loss_mask:
                columns[entry.column] = _column(arrays[name], entry, exists, trained, vocab_size)
    record = pa.record_batch(columns)
    validate(record)
    return record


def _column(array: Array, entry: PaddedField, exists: Mapping[Axis, Mask], trained: Mask, vocab_size: int) -> pa.Array:
    if entry.dtype == "token":
        ids = array[exists[entry.axis]]
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ColumnError(f"token ids go from {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
        return from_padded(array, exists[entry.axis], dtype=token_dtype(vocab_size))
    spec, dtype = column_spec(entry.column), pa.type_for_alias(entry.dtype).to_pandas_dtype()
    if spec.axis != "row":
        return from_padded(array, exists[entry.axis], dtype=dtype)
    if entry.axis != "row":
        return pa.array(_row_values(cast_exactly(np.where(trained, array, 0), dtype), trained))
    rows = cast_exactly(array, dtype)
    return pa.array(rows, mask=np.isnan(rows) if spec.nullable else None)


def _row_values(values: Array, trained: Mask) -> Array:
    """The one value of each row's trained tokens, [B], and 0 for a row that has none."""
    low = values.min(axis=1, where=trained, initial=np.inf)
    high = values.max(axis=1, where=trained, initial=-np.inf)
    has_trained = trained.any(axis=1)
    different = np.flatnonzero(has_trained & (low != high))
    if different.size:
        row = different[0]
        raise ColumnError(
            f"values are not constant over the trained tokens of row {row}, they go from {low[row]} to {high[row]}; "
            f"{different.size} of {low.size} rows are so: the column has one value per row"
        )
    return np.where(has_trained, low, 0).astype(values.dtype)


def _text_column(value: Any, num_rows: int) -> pa.Array:
    texts = listed(value)
    if len(texts) != num_rows or not are_texts(texts):
        kinds = ", ".join(sorted({type(text).__name__ for text in texts}))
        raise ColumnError(f"{len(texts)} values of type {kinds}, expected {num_rows} of type str")
    return pa.array(texts, pa.string())


def _all_fields(names: Sequence[str], layout: PaddedLayout, geometry: Geometry) -> dict[str, PaddedField]:
    """The geometry's fields, after those of the layout whose columns were added since."""
    before = {"loss_mask", *(entry.column for entry in geometry.fields.values())}
    added = {name: entry for name, entry in layout.fields.items() if entry.column in set(names) - before}
    fields = {**added, **geometry.fields}
    require_names(names, [entry.column for entry in fields.values()], "the columns lack")
    return fields


def _padded_fields(
    columns: pa.RecordBatch, fields: Mapping[str, PaddedField], geometry: Geometry, pad_token_id: int
) -> dict[str, Any]:
    response = geometry.runs["response"]
    if "loss_mask" in columns.schema.names:
        trained = to_padded_at(columns.column("loss_mask"), response, False)
    else:
        trained = torch.from_numpy(response.to_mask())
    return {
        name: _padded(columns.column(entry.column), entry, geometry, trained, pad_token_id)
        for name, entry in fields.items()
    }


def _padded(
    column: pa.Array, entry: PaddedField, geometry: Geometry, trained: torch.Tensor, pad_token_id: int
) -> torch.Tensor | list[str]:
    if entry.dtype == "string":
        texts: list[str] = column.to_pylist()
        return texts
    if column_spec(entry.column).axis != "row":
        pad = pad_token_id if entry.dtype == "token" else entry.pad
        return to_padded_at(column, geometry.runs[entry.axis], pad)
    rows = as_tensor(column).clone()  # as_tensor may view memory that other processes share
    return rows if entry.axis == "row" else torch.where(trained, rows[:, None], entry.pad)


def _numbers(name: str, value: Any) -> Array:
    if isinstance(value, torch.Tensor | np.ndarray):
        with _about(name):
            array = host_array(value)
        if array.dtype.kind in "biuf":
            return array
    raise ColumnError(f"field {name!r} is a {type(value).__name__}, expected a tensor or an array of numbers")


@contextmanager
def _about(name: str) -> Iterator[None]:
    try:
        yield
    except ColumnError as error:
        raise ColumnError(f"field {name!r}: {error}") from error
