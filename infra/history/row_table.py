"""The rows of one kept step as a table that can be filtered, sorted and paged, and the metrics over steps. N rows.

The DuckDB that conditions of a page run in reads tables in memory, and no file, and has limited time and memory.
"""

from collections import OrderedDict
from contextlib import closing
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.history.kept_run import KeptRun
from infra.history.token_values import (
    BEHAVIOR,
    MASK,
    REFERENCE,
    SAMPLER,
    TEACHER,
    json_safe,
    row_statistics,
    token_values,
)
from infra.history.views import SANDBOX, StepQueries, named_columns
from infra.storage.run_list import run_state
from infra.storage.runs import RunDirectory
from infra.stores.offline import open_run_columns
from rl_core.views import decode_ints
from schemas.base import Frozen
from schemas.batch import BatchHandle
from schemas.catalog import REWARD_PART_PREFIX, column_spec
from schemas.errors import MetricError, QueryError, RunError
from schemas.metric_catalog import metric_spec

TIMEOUT_SECONDS = 10.0
SCORES = (SAMPLER, BEHAVIOR, REFERENCE, TEACHER, MASK)
FIRST = ("row", "group_id", "reward", "advantages", "num_response_tokens", "finish_reason")  # columns, in order
LAST = ("policy_version", "sample_id", "answer", "info", "prompt_text", "response_text")
MAX_ROWS = 200  # of one page
MAX_TEXT = 160  # characters of a text in a page
MAX_TABLES = 4  # that are kept in memory


class RowQuery(Frozen):
    """Which rows of a step are wanted, in which order."""

    where: str = ""  # a SQL condition over the columns; the step's tokens are the view `tokens`
    sort: str = "row"
    descending: bool = False
    offset: int = 0
    limit: int = 50


class StepTables:
    """Tables of the steps that were asked for last; a step that has changed since is read again."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, int], tuple[object, pa.Table]] = OrderedDict()  # with what it was made of
        self._lock = Lock()

    def of(self, kept: KeptRun, step: int) -> pa.Table:
        """Return `step_table` of a step.

        Raises:
            RunError: The step is not kept.
            StoreError: Its columns are lost or damaged.
        """
        key, batch = (kept.directory.url, step), kept.batch(step)
        source = (batch, kept.checksums(step))
        with self._lock:  # two requests for the same step make its table once
            if key not in self._tables or self._tables[key][0] != source:
                self._tables[key] = (source, step_table(kept, batch))
            self._tables.move_to_end(key)
            while len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
            return self._tables[key][1]


def step_table(kept: KeptRun, batch: BatchHandle) -> pa.Table:
    """Return all columns of single values of a step's rows, and statistics of their tokens: N rows."""
    names = [name for name in batch.columns if column_spec(name).axis == "row"]
    columns = kept.read(batch, {*names, *SCORES, "turn_tokens"})
    lengths = decode_ints(batch.response_lengths)
    scores = token_values({name: column for name, column in columns.items() if name in SCORES}, lengths)
    found: dict[str, Any] = {
        "row": pa.array(range(batch.num_rows), pa.int32()),
        **{name: columns[name] for name in names},
        "num_prompt_tokens": decode_ints(batch.prompt_lengths),
        "num_response_tokens": lengths,
        **row_statistics(scores, lengths),
    }
    if "turn_tokens" in columns:
        found["num_turns"] = pc.list_value_length(columns["turn_tokens"])
    parts = [name for name in names if name.startswith(REWARD_PART_PREFIX)]
    first = [name for name in (*FIRST[:3], *parts, *FIRST[3:]) if name in found]
    last = [name for name in LAST if name in found]
    between = [name for name in found if name not in first and name not in last]
    return pa.table({name: found[name] for name in [*first, *between, *last]})


def select_rows(kept: KeptRun, step: int, table: pa.Table, query: RowQuery) -> dict[str, Any]:
    """Return a page of a step's rows.

    Returns:
        `columns`: of each its `name` and whether it `is_number`; `rows`: lists of values, in the columns' order, long
        texts cut; `num_rows`: of the step; `num_found`: those that fulfil the condition.

    Raises:
        QueryError: The condition or the column to sort by is wrong, or takes too long.
        StoreError: Columns that it reads are lost or damaged.
    """
    if query.sort not in table.column_names:
        raise QueryError(f"the step has no column {query.sort!r} to sort by; it has {', '.join(table.column_names)}")
    is_named = named_columns(f"select {query.where.strip() or None}")
    asked = closing(StepQueries([kept], {"rows": table}, SANDBOX, is_named))
    with asked as queries, queries.errors(TIMEOUT_SECONDS):
        rows = queries.connection.view("rows")
        if query.where.strip():
            rows = rows.filter(query.where)
        direction = "desc" if query.descending else "asc"
        chosen = rows.order(f'{_quoted(query.sort)} {direction} nulls last, "row"').project(
            ", ".join(_shortened(field) for field in table.schema)
        )
        num_found = len(rows) if query.where.strip() else table.num_rows
        page = chosen.limit(max(1, min(query.limit, MAX_ROWS)), offset=max(0, query.offset)).to_arrow_table()
    return {
        "columns": [{"name": field.name, "is_number": not pa.types.is_string(field.type)} for field in table.schema],
        "rows": json_safe([list(row.values()) for row in page.to_pylist()]),
        "num_rows": table.num_rows,
        "num_found": num_found,
    }


def rows_of_group(kept: KeptRun, step: int, table: pa.Table, group: int) -> list[int]:
    """Return the rows of one prompt's samples.

    Raises:
        RunError: The step has no such group.
    """
    groups = table["group_id"] if "group_id" in table.column_names else pa.nulls(table.num_rows, pa.int32())
    rows: list[int] = pc.indices_nonzero(pc.fill_null(pc.equal(groups, group), False)).to_pylist()
    if not rows:
        raise RunError(f"step {step} of run {kept.run_id} has no group {group}")
    return rows


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _shortened(field: pa.Field) -> str:
    name = _quoted(field.name)
    return f"left({name}, {MAX_TEXT}) as {name}" if pa.types.is_string(field.type) else name


def read_trend(directory: RunDirectory) -> dict[str, Any]:
    """Return all metrics of a run's finished steps.

    Returns:
        `run_id`; `state`; `num_steps` of its config; `steps`, the finished ones; `metrics`: of each, by name, a value
        or null for each of `steps`; `kept`: the steps that have columns; `not_kept`: why there are none.

    Raises:
        RunError: Files of the run are of another version of Sluice.
    """
    config, reports = directory.config(), directory.metrics.steps()
    values = [{**report.metrics, **report.telemetry} for report in reports]
    names = dict.fromkeys(["reward", *(name for step in values for name in step)])
    kept, reason = _kept_steps(directory)
    return {
        "run_id": directory.run_id,
        "state": run_state(directory, config),
        "num_steps": config.steps,
        "steps": [report.step for report in reports],
        "metrics": {name: json_safe([step.get(name) for step in values]) for name in names if values},
        "kept": kept,
        "not_kept": reason,
    }


def _kept_steps(directory: RunDirectory) -> tuple[list[int], str | None]:
    try:
        return open_run_columns(directory).steps(), None
    except RunError as error:
        return [], str(error)


def metric_facts(name: str) -> dict[str, str]:
    """Return the unit and meaning of a metric, empty for one that the catalog doesn't have."""
    try:
        spec = metric_spec(name)
    except MetricError:
        return {"unit": "", "meaning": ""}
    return {"unit": spec.unit, "meaning": spec.meaning}
