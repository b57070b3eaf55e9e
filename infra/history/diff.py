"""The differences of two runs, A and B: step by step, stage by stage.

What has the same stored digests is not read.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from infra.history.compare import Closeness, Difference, closeness_of, compare_columns, worst
from infra.storage.runs import RunDirectory
from infra.stores.run_columns import RunColumns, StoredColumns, open_run_columns
from schemas.base import Frozen
from schemas.batch import BatchHandle, ChunkKey, ColumnGroup
from schemas.errors import RunError
from schemas.step import StepReport

TIMES = "_seconds"  # the end of the names of metrics that are different in every run


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
