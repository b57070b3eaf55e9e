"""Comparison of the values of two columns. N and M rows."""

from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from rl_core.columns.jagged import is_jagged, row_lengths
from schemas.base import Frozen

TOLERANCE = 1e-6  # of floating point values, relative to those above 1

Closeness = Literal["same bits", "within 1e-6", "differs"]
ORDER: tuple[Closeness, ...] = ("same bits", "within 1e-6", "differs")


class Difference(Frozen):
    """How the values of a column differ between two runs, A and B."""

    column: str
    closeness: Closeness
    row: int | None = None  # of the first difference, in the step's batch; None: it is in no row
    token: int | None = None  # of the first difference, in its prompt or response, or the turn; None: of single values
    a: str  # the values there
    b: str
    num_different: int = 1  # values, of those that both have
    num_compared: int = 1
    largest: float | None = None  # of the absolute differences; None: not numbers


def closeness_of(gaps: ArrayLike, values: ArrayLike) -> Closeness:
    """Return how close numbers are whose bits differ.

    Args:
        gaps: Their absolute differences, [n].
        values: One of each pair, [n].
    """
    return "within 1e-6" if np.all(gaps <= TOLERANCE * np.maximum(1.0, np.abs(values))) else "differs"


def worst(found: "list[Closeness]") -> Closeness:
    """Return the least close."""
    return ORDER[max((ORDER.index(closeness) for closeness in found), default=0)]


def is_within(found: Closeness, accepted: Closeness) -> bool:
    """Return whether values are at least as close as what is accepted."""
    return ORDER.index(found) <= ORDER.index(accepted)


def compare_columns(name: str, a: pa.Array, b: pa.Array) -> Difference | None:
    """Compare a column of two runs, row by row; None: all bits are the same.

    Where the numbers of rows, or of a row's tokens, differ, the values before are compared.
    """
    if is_jagged(a) != is_jagged(b):
        return Difference(column=name, closeness="differs", a=str(a.type), b=str(b.type))
    if not is_jagged(a):
        found = _compare(name, a[: len(b)], b[: len(a)])
        if found is None and len(a) != len(b):
            return _lengths_differ(name, "rows", len(a), len(b), min(len(a), len(b)), None)
        return found
    return _compare_jagged(name, a, b)


def _compare_jagged(name: str, a: pa.Array, b: pa.Array) -> Difference | None:
    num_rows = min(len(a), len(b))
    lengths, others = row_lengths(a)[:num_rows], row_lengths(b)[:num_rows]
    unequal = np.flatnonzero(lengths != others)
    aligned = int(unequal[0]) if unequal.size else num_rows  # rows before are of the same lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    common = min(int(lengths[aligned]), int(others[aligned])) if unequal.size else 0
    stop = int(starts[aligned]) + common
    found = _compare(name, a.flatten()[:stop], b.flatten()[:stop])
    if found is not None:
        assert found.row is not None
        row = int(np.searchsorted(starts, found.row, side="right")) - 1
        closeness: Closeness = "differs" if unequal.size or len(a) != len(b) else found.closeness
        return found.replace(row=row, token=found.row - int(starts[row]), closeness=closeness)
    if unequal.size:
        return _lengths_differ(name, "values", int(lengths[aligned]), int(others[aligned]), aligned, common)
    return _lengths_differ(name, "rows", len(a), len(b), num_rows, None) if len(a) != len(b) else None


def _lengths_differ(name: str, what: str, a: int, b: int, row: int, token: int | None) -> Difference:
    return Difference(column=name, closeness="differs", row=row, token=token, a=f"{a} {what}", b=f"{b} {what}")


def _compare(name: str, a: pa.Array, b: pa.Array) -> Difference | None:
    """Compare values one by one; `row` of the result is the first different one's index."""
    if pa.types.is_floating(a.type) and a.type == b.type:
        x, y = _floats(a), _floats(b)
        bits = np.dtype(f"u{x.dtype.itemsize}")
        different = (x.view(bits) != y.view(bits)) | (_nulls(a) != _nulls(b))
    else:
        x = y = np.empty(0)
        different = _differ(a, b)
    if not different.any():
        return None
    at = int(np.flatnonzero(different)[0])
    gaps = np.abs(x[different].astype(np.float64) - y[different].astype(np.float64)) if x.size else None
    return Difference(
        column=name,
        closeness="differs" if gaps is None else closeness_of(gaps, x[different]),
        row=at,
        a=_text(a[at].as_py()),
        b=_text(b[at].as_py()),
        num_different=int(different.sum()),
        num_compared=len(a),
        largest=float(gaps.max()) if gaps is not None and np.isfinite(gaps).all() else None,
    )


def _floats(values: pa.Array) -> NDArray[Any]:
    """Return the values; those that are null as NaN of the same bits."""
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False))


def _nulls(values: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(values.is_null().to_numpy(zero_copy_only=False))


def _differ(a: pa.Array, b: pa.Array) -> NDArray[np.bool_]:
    """Return which values differ: vectors, integers of any width, booleans or texts."""
    if pa.types.is_fixed_size_list(a.type) or pa.types.is_fixed_size_list(b.type):
        if a.type != b.type:
            return np.ones(len(a), dtype=bool)
        size = a.type.list_size
        return np.asarray(_differ(a.flatten(), b.flatten()).reshape(-1, size).any(axis=1))
    x, y = (values.to_numpy(zero_copy_only=False) for values in (a, b))
    different: NDArray[np.bool_] = np.asarray(x != y, dtype=bool) | (_nulls(a) != _nulls(b))
    return different


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
