"""The geometry of a padded batch: what is needed, besides its columns, to rebuild it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from rl_core.columns.jagged import row_lengths
from rl_core.padded.layouts import PaddedField, PaddedLayout, require_names
from rl_core.padded.nesting import RunLengths
from schemas.catalog import Axis


@dataclass(frozen=True, eq=False)
class Geometry:
    """Masks, stored fields, dtypes and scalars of a padded batch."""

    runs: Mapping[Axis, RunLengths]  # the mask of each axis, with its width
    fields: Mapping[str, PaddedField]  # the stored fields
    dtypes: Mapping[str, str]  # torch's names, for the fields that are tensors
    scalars: Mapping[str, float]
    channels: Mapping[str, int] = field(default_factory=dict)  # the number of channels of each field that has several

    @classmethod
    def canonical(cls, columns: pa.RecordBatch, layout: PaddedLayout, widths: Mapping[Axis, int]) -> Geometry:
        """Create the geometry of columns that were never padded from the layout's sides and the given widths.

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
