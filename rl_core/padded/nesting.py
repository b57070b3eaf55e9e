"""Conversion of padded fields to jagged columns and back: masks become run lengths, values lose their padding.

B rows of padded width S, V values over all rows, K runs. A mask marks the existing values only; the trained ones among
them are marked by a separate bool column, `loss_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rl_core.columns.jagged import Array, as_tensor, jagged, row_lengths
from schemas.errors import ColumnError

if TYPE_CHECKING:
    import torch

VALUE_DTYPES = ("bool", "uint16", "int32", "float32")  # of the catalog's jagged columns


@dataclass(frozen=True, eq=False)
class RunLengths:
    """A bool mask [B, S] as its runs of true values, row by row; every array has the narrowest dtype that holds S.

    Every mask has exactly one such encoding, whether padded on the left or right, with holes, empty or full.
    """

    width: int  # S
    num_runs: Array  # [B], number of runs of each row
    starts: Array  # [K], first position of each run in its row
    stops: Array  # [K], position after the last one of each run

    @classmethod
    def from_mask(cls, mask: torch.Tensor | Array) -> RunLengths:
        """Encode a mask, [B, S] bool or 0/1 integers.

        Raises:
            ColumnError: The mask has another shape or dtype, or other values.
        """
        exists = as_mask(mask)
        num_rows, width = exists.shape
        steps = np.diff(np.pad(exists.view(np.int8), ((0, 0), (1, 1))), axis=1)
        rows, starts = np.nonzero(steps == 1)
        stops = np.nonzero(steps == -1)[1]
        dtype = np.min_scalar_type(width)
        num_runs = np.bincount(rows, minlength=num_rows)
        return cls(width, num_runs.astype(dtype), starts.astype(dtype), stops.astype(dtype))

    @property
    def num_rows(self) -> int:
        """B."""
        return self.num_runs.size

    @property
    def num_bytes(self) -> int:
        """The size of the arrays."""
        return self.num_runs.nbytes + self.starts.nbytes + self.stops.nbytes

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of true values in each row, [B]."""
        totals = np.zeros(self.starts.size + 1, dtype=np.int64)
        np.cumsum(self._sizes(), out=totals[1:])
        bounds = np.zeros(self.num_rows + 1, dtype=np.int64)
        np.cumsum(self.num_runs, out=bounds[1:])
        return np.diff(totals[bounds])

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of true values in the flattened mask, [V], ascending."""
        sizes = self._sizes()
        firsts = np.repeat(np.arange(self.num_rows) * self.width, self.num_runs) + self.starts
        before = np.cumsum(sizes) - sizes
        return np.repeat(firsts - before, sizes) + np.arange(sizes.sum())

    def to_mask(self) -> npt.NDArray[np.bool_]:
        """Decode the mask, [B, S]."""
        mask = np.zeros((self.num_rows, self.width), dtype=np.bool_)
        mask.reshape(-1)[self.positions()] = True
        return mask

    def _sizes(self) -> npt.NDArray[np.int64]:
        return self.stops.astype(np.int64) - self.starts


def from_padded(
    values: torch.Tensor | Array, mask: torch.Tensor | Array, *, dtype: npt.DTypeLike | None = None
) -> pa.LargeListArray:
    """Convert a padded field to a jagged column, B rows of the values whose mask is true, in order.

    Args:
        values: [B, S], of one of `VALUE_DTYPES`, or with `dtype` of any dtype.
        mask: The existing values, [B, S] bool or 0/1 integers; holes are allowed.
        dtype: One of `VALUE_DTYPES`, which must hold every existing value exactly; required for int64 ids.

    Raises:
        ColumnError: Shapes disagree, the dtype is not one of `VALUE_DTYPES`, or a value does not fit it.
    """
    exists, padded = as_mask(mask), host_array(values)
    if padded.shape != exists.shape:
        raise ColumnError(f"values have shape {list(padded.shape)}, expected {list(exists.shape)} like their mask")
    target = padded.dtype if dtype is None else np.dtype(dtype)
    if target.name not in VALUE_DTYPES:
        raise ColumnError(f"jagged values can't be {target}, expected {', '.join(VALUE_DTYPES)}: pass one as dtype")
    return jagged(cast_exactly(padded[exists], target), exists.sum(axis=1, dtype=np.int64))


def to_padded_at(column: pa.LargeListArray, runs: RunLengths, pad: float) -> torch.Tensor:
    """Pad a jagged column of B rows by a mask, which may have holes: [B, S] on the CPU, as `as_tensor(column)`.

    Args:
        column: A jagged column of B rows.
        runs: The mask, [B, S].
        pad: The value where the mask is false.

    Raises:
        ColumnError: The row lengths are not those of the mask, or the column is not jagged.
        ValueError: The dtype can't hold the pad value.
    """
    import torch  # see `jagged.as_tensor`

    actual, expected = row_lengths(column), runs.lengths
    if actual.size != expected.size:
        raise ColumnError(f"the column has {actual.size} rows, expected {expected.size} like its mask")
    different = np.flatnonzero(actual != expected)
    if different.size:
        row = int(different[0])
        raise ColumnError(f"row {row} has {actual[row]} values, expected {expected[row]} by its mask")
    values = as_tensor(column)
    if not values.is_floating_point() and int(torch.tensor(pad).to(values.dtype)) != pad:
        raise ValueError(f"a {column.type.value_type} column can't be padded with {pad}")
    padded = torch.full((runs.num_rows, runs.width), pad, dtype=values.dtype)
    padded.view(-1)[torch.from_numpy(runs.positions())] = values
    return padded


def as_mask(mask: torch.Tensor | Array) -> npt.NDArray[np.bool_]:
    """Convert a mask of bool or 0/1 integers to bool, [B, S].

    Raises:
        ColumnError: The mask has another shape or dtype, or other values.
    """
    array = host_array(mask)
    if array.ndim != 2 or array.dtype.kind not in "biu":
        raise ColumnError(f"a mask is {array.dtype}{list(array.shape)}, expected bool or 0/1 integers of shape [B, S]")
    exists: npt.NDArray[np.bool_] = array.astype(np.bool_, copy=False)
    if array.dtype != np.bool_ and not np.array_equal(exists, array):
        raise ColumnError(f"a mask has values from {array.min()} to {array.max()}, expected 0 and 1 only")
    return np.ascontiguousarray(exists)


def host_array(values: torch.Tensor | Array) -> Array:
    """Convert a tensor to a numpy array, without a copy if possible; bfloat16, which numpy lacks, becomes float32.

    Raises:
        ColumnError: A nested tensor, which has no padding to remove.
    """
    if isinstance(values, np.ndarray):
        return values
    import torch

    if values.is_nested:
        raise ColumnError("the tensor is already nested, expected a padded one")
    dense = values.detach().cpu()
    array: Array = (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()
    return array


def cast_exactly(values: Array, dtype: npt.DTypeLike) -> Array:
    """Convert values to a dtype that must hold each of them exactly.

    Raises:
        ColumnError: It doesn't; the message shows the first value that would change.
    """
    target: np.dtype[Any] = np.dtype(dtype)
    if values.dtype == target:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(target)
        back = cast.astype(values.dtype)
        changed = (back != values) & ((back == back) | (values == values))
        changed |= (cast < 0) != (values < 0)  # uint64 to int32 and back hides a change of sign
    if changed.any():
        raise ColumnError(
            f"{np.count_nonzero(changed)} of {values.size} {values.dtype} values don't fit {target} exactly, "
            f"the first is {values[changed][0]}"
        )
    return cast
