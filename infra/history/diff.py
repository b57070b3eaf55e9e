"""The differences of two runs, A and B: step by step, stage by stage.

What has the same stored digests is not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from infra.storage.runs import RunDirectory
from infra.stores.offline import RunColumns, StoredColumns, open_run_columns
from rl_core.columns.jagged import is_jagged, row_lengths
from schemas.base import Frozen
from schemas.batch import BatchHandle, ChunkKey, ColumnGroup
from schemas.errors import RunError
from schemas.step import StepReport

TOLERANCE = 1e-6  # of floating point values, relative to those above 1

Closeness = Literal["same bits", "within 1e-6", "differs"]
ORDER: tuple[Closeness, ...] = ("same bits", "within 1e-6", "differs")
TIMES = "_seconds"  # the end of the names of metrics that are different in every run


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


class StageDiff(Frozen):
    """The differences of one stage of a step, in the order of its columns."""

    stage: str  # of the chunks; "plan" and "metrics" follow them
    differences: tuple[Difference, ...]

    @property
    def closeness(self) -> Closeness:
        """The least close of its columns."""
        return worst([found.closeness for found in self.differences])


class StepDiff(Frozen):
    """The comparison of one step that both runs have finished, or have columns of."""

    step: int
    stages: tuple[StageDiff, ...]  # those that are not the same, in order
    has_columns: bool  # of both runs; else only plans and metrics were compared

    @property
    def closeness(self) -> Closeness:
        """The least close of its stages."""
        return worst([stage.closeness for stage in self.stages])


def diff_runs(a: RunDirectory, b: RunDirectory) -> Iterator[StepDiff]:
    """Compare two runs, beginning with their first steps.

    Yields:
        The comparison of each step that both runs have.

    Raises:
        RunError: They have no step in common.
        StoreError: Columns are lost or damaged.
    """
    reports = [{report.step: report for report in run.metrics.steps()} for run in (a, b)]
    stores = [_columns(run) for run in (a, b)]
    batches = [store.steps() if store else [] for store in stores]
    steps = sorted(({*reports[0], *batches[0]}) & ({*reports[1], *batches[1]}))
    if not steps:
        raise RunError(f"runs {a.run_id} and {b.run_id} have no finished step in common")
    for step in steps:
        stages: list[StageDiff] = []
        found = [store.load_batch(step) if store else None for store in stores]
        if has_columns := found[0] is not None and found[1] is not None:
            stages += diff_columns(stores, found)  # type: ignore[arg-type]
        if step in reports[0] and step in reports[1]:
            stages += _diff_reports(reports[0][step], reports[1][step])
        yield StepDiff(step=step, stages=tuple(stage for stage in stages if stage.differences), has_columns=has_columns)


def _columns(run: RunDirectory) -> RunColumns | None:
    try:
        return open_run_columns(run)
    except RunError:  # it keeps none
        return None


def diff_columns(
    stores: Sequence[StoredColumns], batches: Sequence[BatchHandle], without: str = ""
) -> Iterator[StageDiff]:
    """Compare the columns of a step in two runs.

    Args:
        stores: Both runs' columns.
        batches: The step's rows in both.
        without: A stage whose columns are left out.

    Yields:
        The differences by the stage that put the columns, also if there are none.
    """
    a, b = batches
    differences: dict[str, list[Difference]] = {}
    digests = [_digests(store, batch) for store, batch in zip(stores, batches, strict=True)]
    for name in dict.fromkeys([*a.columns, *b.columns]):
        groups = [next((group for group in batch.groups if name in group.dtypes), None) for batch in batches]
        stage = next(_stage(group) for group in groups if group is not None)
        if stage == without:
            continue
        own = differences.setdefault(stage, [])
        if groups[0] is None or groups[1] is None:
            there = ["missing" if group is None else "present" for group in groups]
            own.append(Difference(column=name, closeness="differs", a=there[0], b=there[1]))
            continue
        if digests[0][name] == digests[1][name]:
            continue
        columns = [store.read(batch, [name])[name] for store, batch in zip(stores, batches, strict=True)]
        if (found := compare_columns(name, *columns)) is not None:
            own.append(found)
    yield from (StageDiff(stage=stage, differences=tuple(found)) for stage, found in differences.items())


def _digests(store: StoredColumns, batch: BatchHandle) -> dict[str, object]:
    """Return what determines the values of each column: the checksums of its chunks, and the rows taken of them."""
    sums = {record.ref: record.checksum for record in store.records(batch.step)}
    return {
        name: ([sums.get(ref, ref) for ref in group.chunks], group.segments)
        for group in batch.groups
        for name in group.dtypes
    }


def _stage(group: ColumnGroup) -> str:
    return ChunkKey.parse(group.chunks[0].key).stage if group.chunks else "rollout"


def _diff_reports(a: StepReport, b: StepReport) -> Iterator[StageDiff]:
    """Compare plans by their digests, and metrics by their values."""
    yield diff_plans(a.plan, b.plan)
    yield diff_metrics("metrics", a.metrics, b.metrics)


def diff_plans(a: str | None, b: str | None) -> StageDiff:
    """Compare the digests of two plans."""
    found = Difference(column="digest", closeness="differs", a=str(a), b=str(b))
    return StageDiff(stage="plan", differences=(found,) if a != b else ())


def diff_metrics(stage: str, a: Mapping[str, float], b: Mapping[str, float]) -> StageDiff:
    """Compare the metrics of two runs, without times."""
    names = [name for name in dict.fromkeys([*a, *b]) if not name.endswith(TIMES)]
    pairs = ((name, a.get(name), b.get(name)) for name in names)
    return StageDiff(stage=stage, differences=tuple(_metric(*pair) for pair in pairs if not _same(*pair[1:])))


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and np.isnan(a) and np.isnan(b))


def _metric(name: str, a: float | None, b: float | None) -> Difference:
    texts = ["missing" if value is None else f"{value:.9g}" for value in (a, b)]
    if a is None or b is None:
        return Difference(column=name, closeness="differs", a=texts[0], b=texts[1])
    gap = abs(a - b)
    return Difference(column=name, closeness=closeness_of(gap, a), a=texts[0], b=texts[1], largest=gap)
