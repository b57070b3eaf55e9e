"""SQL views over the kept steps of runs, in DuckDB: a column of a step is read when a query needs its values.

All rows are numbered over all steps. A view's column is a function of these numbers: DuckDB calls it for the rows and
columns that are left of a query. It would call those of tokens for any query: they are an error in the views of tokens
unless the query's text names them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Timer
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType
from numpy.typing import NDArray

from infra.history.kept_run import IDS, ROW_VALUES, KeptRun, field_of, wider
from rl_core.columns.jagged import BRANCH_COLUMNS, TURN_COLUMNS, branches_of
from rl_core.views import decode_ints
from schemas.catalog import Axis
from schemas.errors import PipelineError, QueryError

ReadColumn = Callable[[KeptRun, int, str], pa.Array | None]  # N values, or lists of the values of rows' tokens
IsNamed = Callable[[str], bool]
Options = dict[str, str | bool | int | float | list[str]]

NO_NETWORK: Options = {"autoinstall_known_extensions": False}
SANDBOX: Options = {  # a query sees the views and nothing else
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # a name in a query is never a variable of this process
    "enable_external_access": False,
    "lock_configuration": True,
    "memory_limit": "2GB",
    "temp_directory": "",
    "threads": 2,
}
CACHED_STEPS = 8  # of each column, as threads read several steps at a time
NAMES = ("column_names", "using_columns")  # of DuckDB's parse
PLACES = pa.list_(pa.struct([pa.field(name, pa.int32()) for name in ("update", "rank", "micro_batch")]))


class StepQueries:
    """A DuckDB connection with the views `rows`, `tokens`, `prompt_tokens` and `placements`, and Sluice's own errors.

    Args:
        runs: The runs whose kept steps are seen.
        tables: Further tables by name, or what is seen in place of a view.
        options: DuckDB's settings.
        is_named: Tells whether a column of tokens can be read; see `named_columns`.
    """

    def __init__(
        self, runs: Sequence[KeptRun], tables: Mapping[str, pa.Table], options: Options, is_named: IsNamed
    ) -> None:
        self.connection = duckdb.connect(config=options)
        self._runs, self._is_named = runs, is_named
        self._steps = [(run, step) for run in runs for step in run.batches]
        self._failures: list[PipelineError] = []  # of reads; DuckDB's own error has their text only
        self._create_rows()
        for name, table in tables.items():
            self.connection.register(name, table)
        selects = {
            "rows": self._rows,
            "tokens": lambda: self._tokens("tokens", "response"),
            "prompt_tokens": lambda: self._tokens("prompt_tokens", "prompt"),
            "placements": self._placements,
        }
        with_values = f"select {', '.join(self._row_values())} from kept_rows"
        for name, select in selects.items():
            if name not in tables:
                columns = ", ".join(["run_id", "step", "row", *select()])
                self.connection.execute(f"create view {name} as select {columns} from ({with_values})")

    @contextmanager
    def errors(self, timeout_seconds: float | None = None) -> Iterator[None]:
        """Raise the errors of DuckDB in the block as Sluice's own, and end it after a time.

        Raises:
            QueryError: DuckDB rejects a query, or it took too long or was stopped.
            StoreError: Columns that it reads are lost or damaged.
        """
        self._failures.clear()
        timer = Timer(timeout_seconds or 0, self.connection.interrupt)
        timer.daemon = True
        if timeout_seconds is not None:
            timer.start()
        try:
            yield
        except duckdb.InterruptException:
            limit = "" if timeout_seconds is None else f" after {timeout_seconds:.3g} s"
            raise QueryError(f"the query was stopped{limit}") from None
        except duckdb.Error as error:
            if self._failures:
                raise self._failures[0].with_traceback(None) from None
            raise QueryError(one_line(error)) from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _create_rows(self) -> None:
        """Create the table `kept_rows`: the keys, numbers and lengths of all rows."""
        batches = [run.batches[step] for run, step in self._steps]
        counts = np.array([batch.num_rows for batch in batches], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts)])  # the number of each step's first row, [S+1]
        steps, numbers = np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum())
        keys: dict[str, object] = {
            "run_id": pa.array([run.run_id for run, _ in self._steps], pa.string()).take(pa.array(steps)),
            "step": np.array([step for _, step in self._steps], dtype=np.int32)[steps],
            "row": (numbers - self._starts[steps]).astype(np.int32),
            "number": numbers,
        }
        for axis in IDS:
            lengths = [decode_ints(getattr(batch, f"{axis}_lengths")) for batch in batches]
            keys[f"num_{axis}_tokens"] = np.concatenate([np.zeros(0), *lengths]).astype(np.int32)
        self.connection.register("keys", pa.table(keys))
        self.connection.execute("create table kept_rows as from keys")
        self.connection.unregister("keys")

    def _rows(self) -> Iterator[str]:
        axes: tuple[Axis, ...] = ("row", "prompt", "response", "turn", "sampling_mask")
        for name, dtype in (each for axis in axes for each in self._dtypes(axis).items()):
            yield self._column("rows", field_of(name, dtype), KeptRun.column)
        if BRANCH_COLUMNS[-1] in self._dtypes("turn"):
            yield self._column("rows", pa.field("num_branches", pa.int32()), _num_branches)
        yield from ("num_prompt_tokens", "num_response_tokens")

    def _tokens(self, view: str, axis: Axis) -> Iterator[str]:
        def read(run: KeptRun, step: int, name: str) -> pa.Array | None:
            return run.tokens(step, axis, name)

        own, of_rows = self._dtypes(axis), self._dtypes("row") if axis == "response" else {}
        for name in (name for name in ROW_VALUES if name in of_rows):
            has_turns = name == "advantages" and TURN_COLUMNS[0] in self._dtypes("turn")
            yield self._list(view, field_of(name, of_rows[name]), read) if has_turns else name
        yield f"unnest(range(num_{axis}_tokens))::int as position"
        fields = [field_of(name, dtype, is_flat=True) for name, dtype in own.items()]
        for field in [*fields, pa.field("text", pa.string())] if IDS[axis] in own else fields:
            yield self._list(view, field, read)

    def _row_values(self) -> Iterator[str]:
        """Yield columns of rows that tokens have, too; in a query of its own, they are read by row, not by token."""
        yield "*"
        for name, dtype in self._dtypes("row").items():
            if name in ROW_VALUES:
                yield self._column("row_values", field_of(name, dtype), KeptRun.column)

    def _placements(self) -> Iterator[str]:
        places = self._function("placements", pa.field("place", PLACES), lambda run, step, _: run.places(step))
        yield f"unnest({places}, recursive := true)"

    def _column(self, view: str, field: pa.Field, read: ReadColumn) -> str:
        return f'{self._function(view, field, read)} as "{field.name}"'

    def _list(self, view: str, field: pa.Field, read: ReadColumn) -> str:
        """Return the column of a view of tokens that has the values of `field`, of which `read` returns lists."""
        if not self._is_named(field.name):
            return f"error('the query has to name the column {field.name}')::{self._type(field)} as \"{field.name}\""
        lists = self._function(view, pa.field(field.name, pa.large_list(field.type)), read)
        return f'unnest({lists}) as "{field.name}"'

    def _function(self, view: str, field: pa.Field, read: ReadColumn) -> str:
        """Create the function that returns a column's values, and return a call of it."""
        # The connection keeps the function, which must not refer to it: neither would ever be freed.
        steps, starts, failures, name = self._steps, self._starts, self._failures, f"{view}:{field.name}"

        @lru_cache(maxsize=CACHED_STEPS)
        def column(at: int) -> pa.Array:
            run, step = steps[at]
            found = read(run, step, field.name)
            return pa.nulls(int(starts[at + 1] - starts[at]), field.type) if found is None else found.cast(field.type)

        def values(numbers: pa.ChunkedArray) -> pa.Array:
            wanted = numbers.to_numpy()
            places = np.searchsorted(starts, wanted, side="right") - 1
            bounds = np.flatnonzero(np.diff(places, prepend=-1))
            try:
                parts = [
                    _take(column(int(places[at])), wanted[at:stop] - starts[places[at]])
                    for at, stop in zip(bounds, [*bounds[1:], len(wanted)], strict=True)
                ]
            except PipelineError as error:
                failures.append(error)
                raise
            return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

        self.connection.create_function(
            name,
            values,
            ["BIGINT"],
            self._type(field),
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
        )
        return f'"{name}"(number)'

    def _type(self, field: pa.Field) -> Any:
        """Return DuckDB's type of a field's values."""
        return self.connection.from_arrow(pa.schema([field]).empty_table()).types[0]

    def _dtypes(self, axis: Axis) -> dict[str, str]:
        found: dict[str, str] = {}
        for run in self._runs:
            for name, dtype in run.fields(axis).items():
                found[name] = wider(name, found.get(name), dtype)
        return found


def _num_branches(run: KeptRun, step: int, _: str) -> pa.Array | None:
    """Return how often each row of a step branches; None if the step has no turns, or is of an earlier version."""
    turns = [run.column(step, name) for name in BRANCH_COLUMNS]
    found = [column for column in turns if column is not None]
    if len(found) < len(turns):
        return None
    return pa.array(np.bincount(branches_of(*found).row, minlength=len(found[0])).astype(np.int32))


def named_columns(sql: str) -> IsNamed:
    """Return which columns a query names, by its parse, or takes all of with a star."""
    if (nodes := _parse(sql)) is None:
        return lambda name: True
    names = {name.lower() for node in nodes for key in NAMES for name in node.get(key, ())}
    stars = [set(map(str.lower, node["exclude_list"])) for node in nodes if node.get("class") == "STAR"]
    return lambda name: name in names or any(name not in excluded for excluded in stars)


def named_tables(sql: str) -> IsNamed:
    """Return which tables and views a query names, by its parse."""
    if (nodes := _parse(sql)) is None:
        return lambda name: True
    names = {str(node.get("table_name")).lower() for node in nodes}
    return lambda name: name in names


def _parse(sql: str) -> list[dict[str, Any]] | None:
    """Return the nodes of a query's parse; None if it is no `select`, such as a pivot."""
    ((text,),) = duckdb.connect().execute("select json_serialize_sql($1)", [sql]).fetchall()
    tree = json.loads(text)
    return None if tree["error"] else list(_nodes(tree))


def _nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a query's parse, without the star that `order by all` is."""
    if isinstance(tree, dict):
        if "null_order" in tree and tree["expression"].get("expr", tree) is None:
            return
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(each)


def _take(column: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    is_slice = np.all(np.diff(rows) == 1)
    return column[int(rows[0]) : int(rows[-1]) + 1] if is_slice else column.take(pa.array(rows))


def one_line(error: duckdb.Error) -> str:
    """Return an error of DuckDB in one line."""
    return " ".join(str(error).split())
