"""Arrow datasets over the kept steps of runs: a query reads only the steps and columns that it needs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from infra.history.kept_run import (
    IDS,
    KEY_FIELDS,
    LENGTH_FIELDS,
    ROW_VALUES,
    KeptRun,
    field_of,
    wider,
)
from schemas.catalog import Axis
from schemas.errors import PipelineError

ReadStep = Callable[[KeptRun, int, Sequence[pa.Field]], pa.RecordBatch]


class StepDataset(ds.Dataset):  # type: ignore[misc]
    """A dataset with a part for each step of each run, which is made when it is scanned.

    Args:
        runs: The runs.
        schema: Its schema, which begins with `KEY_FIELDS`.
        read: Reads some fields of a step.
    """

    def __init__(self, runs: Sequence[KeptRun], schema: pa.Schema, read: ReadStep) -> None:  # not of `Dataset`
        self._runs, self._schema, self._read = {run.run_id: run for run in runs}, schema, read
        self.failure: PipelineError | None = None  # of a scan; DuckDB's own error has its text only
        self._parts = _parts([(run.run_id, step) for run in runs for step in run.batches], schema)

    @property
    def schema(self) -> pa.Schema:
        """The schema of all columns."""
        return self._schema

    def scanner(
        self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None, **_: Any
    ) -> ds.Scanner:
        """Return a scanner of some columns of the rows that fulfil the filter; other arguments are hints."""
        names = self._schema.names if columns is None else list(columns)
        schema = pa.schema([self._schema.field(name) for name in names])
        return ds.Scanner.from_batches(self._scan(schema, filter), schema=schema)

    def _scan(self, schema: pa.Schema, condition: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        # The names of an expression's columns are not to be had; those in its text include them.
        text = "" if condition is None else str(condition)
        fields = list(schema) + [f for f in self._schema if f.name in text and f.name not in schema.names]
        for part in self._parts.get_fragments(condition):
            run_id, step = part.path.rsplit("/", 1)
            try:
                batch = self._read(self._runs[run_id], int(step), fields)
            except PipelineError as error:
                self.failure = error
                raise
            if condition is not None:
                batch = batch.filter(condition)
            yield batch.select(schema.names) if len(fields) > len(schema) else batch


def row_dataset(runs: Sequence[KeptRun]) -> StepDataset:
    """Return all rows of all kept steps: a list for each column that isn't of single values."""
    axes: tuple[Axis, ...] = ("row", "prompt", "response", "turn")
    columns = [field_of(name, dtype) for axis in axes for name, dtype in _dtypes(runs, axis).items()]
    return StepDataset(runs, pa.schema([*KEY_FIELDS, *columns, *LENGTH_FIELDS]), KeptRun.rows)


def token_dataset(runs: Sequence[KeptRun], axis: Axis) -> StepDataset:
    """Return all tokens of the prompts or the responses of all kept steps."""
    of_rows = _dtypes(runs, "row") if axis == "response" else {}
    columns = [
        *(field_of(name, of_rows[name]) for name in ROW_VALUES if name in of_rows),
        pa.field("position", pa.int32()),
        *(field_of(name, dtype, is_flat=True) for name, dtype in _dtypes(runs, axis).items()),
        *([pa.field("text", pa.string())] if IDS[axis] in _dtypes(runs, axis) else []),
    ]
    return StepDataset(
        runs, pa.schema([*KEY_FIELDS, *columns]), lambda run, step, fields: run.tokens(step, axis, fields)
    )


def placement_dataset(runs: Sequence[KeptRun]) -> StepDataset:
    """Return the update, rank and micro-batch of each row of each kept step."""
    fields = [pa.field(name, pa.int32()) for name in ("update", "rank", "micro_batch")]
    return StepDataset(runs, pa.schema([*KEY_FIELDS, *fields]), KeptRun.placements)


def _dtypes(runs: Sequence[KeptRun], axis: Axis) -> dict[str, str]:
    found: dict[str, str] = {}
    for run in runs:
        for name, dtype in run.fields(axis).items():
            found[name] = wider(name, found.get(name), dtype)
    return found


def _parts(steps: Sequence[tuple[str, int]], schema: pa.Schema) -> ds.FileSystemDataset:
    """Return a dataset whose files are never opened: it knows which steps a condition leaves."""
    files, kind = pyarrow.fs.LocalFileSystem(), ds.IpcFileFormat()
    fragments = [
        kind.make_fragment(f"{run_id}/{step}", files, (ds.field("run_id") == run_id) & (ds.field("step") == step))
        for run_id, step in steps
    ]
    return ds.FileSystemDataset(fragments, schema, kind, files)
