"""Restoration of a padded batch from its columns.

B rows, P prompt positions, R response positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rl_core.columns.codec import validate
from rl_core.columns.jagged import BRANCH_COLUMNS, as_tensor, branches_of
from rl_core.padded.layouts import Geometry, PaddedField, PaddedLayout, channel_column, derive, require_names
from rl_core.padded.nesting import to_padded_at
from schemas.catalog import column_spec
from schemas.errors import ColumnError

_TRAINER_DTYPES = {"token": "int64", "bool": "int64", "int32": "int64", "float": "float32"}


def unnest(columns: pa.RecordBatch, layout: PaddedLayout, geometry: Geometry, pad_token_id: int) -> dict[str, Any]:
    """Rebuild the padded batch.

    Args:
        columns: The columns from `nest`. Columns added since then become fields too, if the layout has fields for them.
        layout: The layout that the batch was nested with.
        geometry: The geometry from `nest`, or `Geometry.canonical`.
        pad_token_id: The token id of the padding.

    Returns:
        The fields of the original batch, except dense ones: CPU tensors of the same shapes and dtypes, and lists of
        strings. They equal the originals at every existing token, and the layout's padding elsewhere; a value that is
        repeated over a row equals the original at every trained token.

    Raises:
        ColumnError: A column is missing or not as declared, its row lengths are not those of the geometry, or a row
            branches, so that its tokens are no sequence.
    """
    turns = [columns.column(name) for name in BRANCH_COLUMNS if name in columns.schema.names]
    if len(turns) == len(BRANCH_COLUMNS) and len(rows := branches_of(*turns).row):
        raise ColumnError(f"row {rows[0]} branches, and so has no padded form; leave out rows that branch")
    fields = _all_fields(columns.schema.names, layout, geometry)
    validate(columns, {axis: runs.lengths for axis, runs in geometry.runs.items()})
    exists = {axis: runs.to_mask() for axis, runs in geometry.runs.items()}
    batch = _padded_fields(columns, fields, geometry, pad_token_id)
    ids = [batch[name].numpy() for name in layout.ids.values()]
    for name, axes in layout.masks.items():
        batch[name] = torch.from_numpy(np.concatenate([exists[axis] for axis in axes], axis=1))
    for name, num_channels in geometry.channels.items():
        parts = [_channel(columns, layout.channels[name], channel, geometry) for channel in range(num_channels)]
        batch[name] = torch.stack(parts, dim=1)
    for name in layout.derived.keys() & geometry.dtypes.keys() - geometry.channels.keys():
        batch[name] = torch.from_numpy(derive(layout.derived[name], ids, exists))
    batch |= {name: torch.tensor(value) for name, value in geometry.scalars.items()}
    dtypes = {name: _TRAINER_DTYPES.get(entry.dtype, "") for name, entry in fields.items()} | dict(geometry.dtypes)
    return {
        name: value.to(getattr(torch, dtypes[name])) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _channel(columns: pa.RecordBatch, stem: str, channel: int, geometry: Geometry) -> torch.Tensor:
    """Return one channel of a field, [B, P + R]."""
    found = {axis: columns.column(channel_column(axis, stem, channel)) for axis in geometry.runs}
    return torch.cat([to_padded_at(column, geometry.runs[axis], 0) for axis, column in found.items()], dim=1)


def _all_fields(names: Sequence[str], layout: PaddedLayout, geometry: Geometry) -> dict[str, PaddedField]:
    """Return the fields to rebuild: those of the geometry, and those whose columns were added since."""
    stored = {"loss_mask", *(entry.column for entry in geometry.fields.values())}
    added = {name: entry for name, entry in layout.fields.items() if entry.column in set(names) - stored}
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
        strings: list[str] = column.to_pylist()
        return strings
    if column_spec(entry.column).axis != "row":
        pad = pad_token_id if entry.dtype == "token" else entry.pad
        return to_padded_at(column, geometry.runs[entry.axis], pad)
    rows = as_tensor(column).clone()  # as_tensor may view memory that other processes share
    return rows if entry.axis == "row" else torch.where(trained, rows[:, None], entry.pad)
