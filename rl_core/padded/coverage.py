"""A report of the disposition of every field of a padded batch when its padding is removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from rl_core.columns.jagged import Array
from rl_core.padded.layouts import Geometry, PaddedLayout, channel_column
from schemas.catalog import column_spec
from schemas.errors import ColumnError

Disposition = Literal["jagged", "row", "derived", "scalar", "assumed", "dense"]


@dataclass(frozen=True)
class FieldCoverage:
    """The disposition of one field; `assumed` is a loss mask that the batch lacks and that was filled in."""

    name: str
    disposition: Disposition
    column: str
    shape: tuple[int, ...]
    dtype: str
    padded_bytes: int | None  # None: unknown, for neither numbers nor strings
    stored_bytes: int

    @classmethod
    def of(
        cls, name: str, value: Any, disposition: Disposition, column: str = "", stored_bytes: int = 0
    ) -> FieldCoverage:
        """Create the entry of a field with this padded value."""
        if isinstance(value, torch.Tensor | np.ndarray) and getattr(value.dtype, "kind", "f") in "biufc":
            return cls(name, disposition, column, tuple(value.shape), dtype_name(value), value.nbytes, stored_bytes)
        items = as_list(value)
        if not are_strings(items):
            return cls(name, disposition, column, (len(items),), type(value).__name__, None, stored_bytes)
        num_bytes = sum(len(item.encode()) for item in items)
        return cls(name, disposition, column, (len(items),), "text", num_bytes, stored_bytes)

    def __str__(self) -> str:
        size = "an unknown number of" if self.padded_bytes is None else self.padded_bytes
        return f"{self.name} {list(self.shape)} {self.dtype}, {size} bytes"


@dataclass(frozen=True)
class CoverageReport:
    """The disposition of every field of a padded batch."""

    fields: tuple[FieldCoverage, ...]

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        layout: PaddedLayout,
        geometry: Geometry,
        columns: pa.RecordBatch,
    ) -> CoverageReport:
        """Create the report of a batch's padded `values`, which became `columns` and a geometry."""
        fields, runs, entries = geometry.fields, geometry.runs, []
        for name, value in values.items():
            if name in geometry.channels:
                stem, parts = layout.channels[name], range(geometry.channels[name])
                num_bytes = sum(columns.column(channel_column(axis, stem, n)).nbytes for axis in runs for n in parts)
                entries.append(FieldCoverage.of(name, value, "jagged", f"<axis>_{stem}_<n>", num_bytes))
            elif name in fields:
                column = fields[name].column
                disposition: Disposition = "row" if column_spec(column).axis == "row" else "jagged"
                entries.append(FieldCoverage.of(name, value, disposition, column, columns.column(column).nbytes))
            elif name in layout.masks:
                num_bytes = sum(runs[axis].num_bytes for axis in layout.masks[name])
                entries.append(FieldCoverage.of(name, value, "derived", stored_bytes=num_bytes))
            elif name in layout.derived:
                entries.append(FieldCoverage.of(name, value, "derived"))
            elif name in layout.scalars:
                entries.append(FieldCoverage.of(name, value, "scalar", stored_bytes=value.nbytes))
            else:
                entries.append(FieldCoverage.of(name, value, "dense"))
        if layout.loss_mask not in values:
            num_bytes = columns.column("loss_mask").nbytes
            entries.append(FieldCoverage(layout.loss_mask, "assumed", "loss_mask", (), "absent", 0, num_bytes))
        return cls(tuple(entries))

    @property
    def dense(self) -> tuple[FieldCoverage, ...]:
        """The fields that are not in the columns and can't be rebuilt from them."""
        return tuple(entry for entry in self.fields if entry.disposition == "dense")

    @property
    def padded_bytes(self) -> int:
        """The size of the padded batch."""
        return sum(entry.padded_bytes or 0 for entry in self.fields)

    @property
    def stored_bytes(self) -> int:
        """The size of the columns and the masks' run lengths, without dense fields."""
        return sum(entry.stored_bytes for entry in self.fields)

    @property
    def ratio(self) -> float:
        """The factor by which the batch is smaller, with its dense fields at full size."""
        remaining = self.stored_bytes + sum(entry.padded_bytes or 0 for entry in self.dense)
        return self.padded_bytes / remaining if remaining else 1.0

    def __str__(self) -> str:
        rows = [("field", "disposition", "column", "shape", "dtype", "padded bytes", "stored bytes")]
        for entry in self.fields:
            size = "unknown" if entry.padded_bytes is None else str(entry.padded_bytes)
            shape = str(list(entry.shape))
            rows.append(
                (entry.name, entry.disposition, entry.column, shape, entry.dtype, size, str(entry.stored_bytes))
            )
        rows.append(("total", "", "", "", "", str(self.padded_bytes), str(self.stored_bytes)))
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row[:5], widths)) for row in rows]
        sizes = ["  ".join(map(str.rjust, row[5:], widths[5:])) for row in rows]
        table = [f"{line}  {size}" for line, size in zip(lines, sizes, strict=True)]
        return "\n".join([*table, f"{self.ratio:.1f} times smaller, {len(self.dense)} fields stay dense"])


def reject_dense(values: Mapping[str, Any], layout: PaddedLayout) -> None:
    """Reject fields that the layout does not know.

    Raises:
        ColumnError: There is one; the message shows the shape, dtype and size of each.
    """
    if values:
        dense = "; ".join(str(FieldCoverage.of(name, value, "dense")) for name, value in values.items())
        raise ColumnError(
            f"{len(values)} fields would stay dense, because the {layout.name} layout does not know them: {dense}. "
            "Drop them, declare those of shape [B] in row_scalars, or pass strict=False and keep them yourself"
        )


def as_list(value: Any) -> list[Any]:
    """Return the rows of a field that is not an array of numbers; a single value is one row."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return [value]
    return list(value.tolist() if hasattr(value, "tolist") else value)  # a TensorDict's strings have tolist, too


def are_strings(values: list[Any]) -> bool:
    """Return whether all values are strings."""
    return all(isinstance(value, str) for value in values)


def dtype_name(value: torch.Tensor | Array) -> str:
    """Return the name of the dtype, the same for a tensor and an array."""
    return str(value.dtype).removeprefix("torch.")
