"""Saved queries that a run asks after each step: what one of them returns is what is wrong with the step."""

import json
import time
from pathlib import Path

from infra.history.sql import RunQueries, check_query
from schemas.errors import ConfigError, PipelineError, QueryError
from schemas.step import FailedQuery

STEP = "step"  # the parameter of a query, `$step`: the finished step
LIMIT_SECONDS = 300.0  # for all queries of a step
MAX_ROWS = 3  # of a result that are shown


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
    failed, end = [], time.monotonic() + LIMIT_SECONDS
    for name, sql in queries.items():
        try:
            if (left := end - time.monotonic()) <= 0:
                raise QueryError(f"not asked: the queries before it took {LIMIT_SECONDS:g} s")
            table = runs.query(sql, {STEP: step} if f"${STEP}" in sql else None, left)
        except PipelineError as error:
            failed.append(FailedQuery(name=name, error=str(error)))
            continue
        if table.num_rows:
            rows = tuple(json.dumps(row, default=str) for row in table.slice(0, MAX_ROWS).to_pylist())
            failed.append(FailedQuery(name=name, num_rows=table.num_rows, rows=rows))
    return failed
