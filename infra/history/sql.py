"""SQL over runs, with DuckDB: views of what they keep. Columns and plans are read when a query asks for them.

Views:
    runs            one row per run, with its config as JSON
    steps           one row per finished step: its policy version, time, plan, and each metric as a column
    metrics         the same metrics, one row for each: run_id, step, name, value
    evals           one row per evaluation
    placements      the update, rank and micro-batch of each row in each kept step's plan
    rows            one row per sample of each kept step: all columns of the catalog, those of tokens as lists
    tokens          one row per response token, with the columns of the axis `response` and its text
    prompt_tokens   one row per prompt token

`run_id`, `step` and `row` are the keys. Steps are counted from 0, rows as in the step's batch.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path

import duckdb
import pyarrow as pa

from infra.history.kept_run import KeptRun, ranges
from infra.history.views import NO_NETWORK, IsNamed, Options, StepQueries, named_columns, named_tables, one_line
from infra.storage.lineage import load_fork
from infra.storage.run_list import run_state
from infra.storage.runs import RunDirectory
from schemas.config import DEFAULT_RUNS_DIR
from schemas.errors import ConfigError, PipelineError, QueryError, RunError
from schemas.step import FailedQuery

MetricRow = tuple[str, int, str, float]
STEP = "step"  # the parameter of a saved query, `$step`: the finished step
CHECK_SECONDS = 300.0  # for all saved queries of a step
CHECK_STEPS = 50  # that saved queries see, the newest ones: a long run has thousands
SHOWN_ROWS = 3  # of what a saved query returns


def open_runs(*runs: str, runs_dir: str = DEFAULT_RUNS_DIR) -> "RunQueries":
    """Open runs for queries: `open_runs("demo").sql("select ... from tokens").df()`.

    Args:
        runs: Runs' directories or ids.
        runs_dir: The folder in which to look for an id.

    Raises:
        RunError: There is no such run, two have the same id, or its files are of another version of Sluice.
    """
    return RunQueries([RunDirectory.open(run, runs_dir) for run in runs])


class RunQueries:
    """Runs that are open for queries, with Sluice's own errors.

    Args:
        directories: The runs.
        options: DuckDB's settings.
        first: The first step that is seen, of `runs` and `evals` all.

    Raises:
        RunError: Two have the same id, or the files of one are of another version of Sluice.
    """

    def __init__(self, directories: Sequence[RunDirectory], options: Options = NO_NETWORK, first: int = 0) -> None:
        names = [directory.run_id for directory in directories]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise RunError(f"two of the runs have the id {repeated}; ask for one of them only")
        self._runs, self._options = [KeptRun(directory, first=first) for directory in directories], options
        self._asked: StepQueries | None = None  # by `query`
        self._is_stopped = False
        steps = cache(partial(_step_tables, directories, first))
        self._tables: dict[str, Callable[[], pa.Table]] = {  # made when a query names them: runs may be long
            "runs": cache(partial(_runs_table, directories)),
            "steps": lambda: steps()["steps"],
            "metrics": lambda: steps()["metrics"],
            "evals": cache(partial(_evals_table, directories)),
        }

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the result of a query as DuckDB's, which has a connection with the views of this module.

        Raises:
            duckdb.Error: DuckDB rejects the query or, when the result is read, a column of it is lost or damaged.
        """
        return self._open(query, lambda name: True).connection.sql(query)

    def query(
        self, sql: str, parameters: dict[str, object] | None = None, timeout_seconds: float | None = None
    ) -> pa.Table:
        """Return the result of one statement.

        Raises:
            QueryError: DuckDB rejects it, it is more than a query, or it took too long.
            StoreError: Columns that it reads are lost or damaged.
        """
        check_query(sql)
        try:
            with closing(self._open(sql, named_tables(sql))) as self._asked, self._asked.errors(timeout_seconds):
                if self._is_stopped:
                    raise QueryError("the queries were stopped")
                return self._asked.connection.sql(sql, params=parameters).to_arrow_table()
        except QueryError as error:
            raise QueryError(str(error) + "".join(f"; {run.missing}" for run in self._runs if run.missing)) from None

    def stop(self) -> None:
        """End the query that runs in another thread, and refuse later ones."""
        self._is_stopped = True
        with suppress(duckdb.ConnectionException):  # it has ended
            if self._asked is not None:
                self._asked.connection.interrupt()

    def missing_steps(self) -> str:
        """Say which steps before they were forked have no columns; empty if all have."""
        forks = [(run, fork) for run in self._runs if (fork := load_fork(run.directory))]
        lacking = [(run, fork, sorted(set(range(fork.step)) - run.batches.keys())) for run, fork in forks]
        return "; ".join(
            f"run {run.run_id} has the metrics of steps {', '.join(ranges(steps))}, but no columns, as run "
            f"{fork.run_id} had none or is gone from {fork.parent}"
            for run, fork, steps in lacking
            if steps
        )

    def _open(self, sql: str, is_named: IsNamed) -> StepQueries:
        tables = {name: make() for name, make in self._tables.items() if is_named(name)}
        return StepQueries(self._runs, tables, self._options, named_columns(sql))


def check_query(sql: str) -> None:
    """Check that a text is one query, such as a SELECT, which changes nothing; its names are not looked up.

    Raises:
        QueryError: It is something else.
    """
    try:
        statements = duckdb.connect().extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(one_line(error)) from None
    if [statement.expected_result_type for statement in statements] != [[duckdb.ExpectedResultType.QUERY_RESULT]]:
        raise QueryError(f"expected one query, such as a SELECT, got {sql!r}")


def read_query(text: str) -> str:
    """Return a query, or that of the file whose name is given, which ends in `.sql`.

    Raises:
        QueryError: There is no such file.
    """
    if not text.endswith(".sql"):
        return text
    try:
        return Path(text).read_text()
    except OSError as error:
        raise QueryError(f"{text} can't be read: {error.strerror}") from None


def _runs_table(directories: Sequence[RunDirectory]) -> pa.Table:
    rows = []
    for directory in directories:
        config, events = directory.config(), directory.metrics.events()
        rows.append(
            {
                "run_id": directory.run_id,
                "directory": directory.url,
                "state": run_state(directory, config),
                "config": config.model_dump_json(),
                "versions": json.dumps(events[-1].versions if events else {}),
                "forked_from": str(fork) if (fork := load_fork(directory)) else None,
                "started_at": events[0].time if events else None,
            }
        )
    names = ("run_id", "directory", "state", "config", "versions", "forked_from")
    schema = pa.schema([*((name, pa.string()) for name in names), ("started_at", pa.float64())])
    return pa.Table.from_pylist(rows, schema)


def _step_tables(directories: Sequence[RunDirectory], first: int) -> dict[str, pa.Table]:
    """Return `steps` and `metrics`, from a first step on."""
    steps: list[dict[str, object]] = []
    metrics: list[MetricRow] = []
    for directory in directories:
        for report in directory.metrics.last_steps(first):
            values = {**report.telemetry, **report.metrics}
            fixed = report.model_dump(include={"step", "policy_version", "seconds", "started_at", "plan", "config"})
            steps.append({"run_id": directory.run_id, **values, **fixed})
            metrics.extend((directory.run_id, report.step, name, value) for name, value in values.items())
    fixed_types = {
        "run_id": pa.string(),
        "step": pa.int32(),
        "policy_version": pa.int32(),
        "seconds": pa.float64(),
        "started_at": pa.float64(),
        "plan": pa.string(),
        "config": pa.string(),
    }
    names = {**fixed_types, **{name: pa.float64() for _, _, name, _ in metrics if name not in fixed_types}}
    schema = pa.schema([("run_id", pa.string()), ("step", pa.int32()), ("name", pa.string()), ("value", pa.float64())])
    return {
        "steps": pa.Table.from_pylist(steps, pa.schema(list(names.items()))),
        "metrics": pa.table([list(column) for column in zip(*metrics, strict=True)] or [[]] * 4, schema),
    }


def _evals_table(directories: Sequence[RunDirectory]) -> pa.Table:
    names = {
        "policy_version": pa.int32(),
        "num_prompts": pa.int32(),
        "accuracy": pa.float64(),
        "reward": pa.float64(),
        "seconds": pa.float64(),
        "measured": pa.string(),
    }
    rows = [
        {"run_id": directory.run_id, **report.model_dump(include=set(names))}
        for directory in directories
        for report in directory.metrics.evals()
    ]
    return pa.Table.from_pylist(rows, pa.schema([("run_id", pa.string()), *names.items()]))


def load_queries(folder: str) -> dict[str, str]:
    """Return the saved queries of a folder by name: its files that end in `.sql`.

    Raises:
        ConfigError: There are none, or one is not a query.
    """
    queries = {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.sql"))}
    if not queries:
        raise ConfigError(f"approval.queries = {folder!r} has no file that ends in .sql; add one, or leave it out")
    for name, sql in queries.items():
        try:
            check_query(sql)
        except QueryError as error:
            raise ConfigError(f"approval.queries: {folder}/{name}.sql: {error}") from None
    return queries


def check_step(runs: RunQueries, step: int, queries: dict[str, str]) -> list[FailedQuery]:
    """Ask all queries about a finished step; return those that have an answer, or none can be found for."""
    failed, end = [], time.monotonic() + CHECK_SECONDS
    for name, sql in queries.items():
        try:
            if (left := end - time.monotonic()) <= 0:
                raise QueryError(f"not asked: the queries before it took {CHECK_SECONDS:g} s")
            table = runs.query(sql, {STEP: step} if f"${STEP}" in sql else None, left)
        except PipelineError as error:
            failed.append(FailedQuery(name=name, error=str(error)))
            continue
        if table.num_rows:
            rows = tuple(json.dumps(row, default=str) for row in table.slice(0, SHOWN_ROWS).to_pylist())
            failed.append(FailedQuery(name=name, num_rows=table.num_rows, rows=rows))
    return failed
