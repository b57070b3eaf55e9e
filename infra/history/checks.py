"""Saved queries that a run asks after each step: what one of them returns is what is wrong with the step.

    python -m infra.history.checks RUN STEP FOLDER

It runs in a process of its own, as the driver holds no token.
"""

import json
import sys
from pathlib import Path

from infra.history.sql import RunQueries, check_query
from infra.storage.runs import RunDirectory
from schemas.errors import ConfigError, PipelineError, QueryError
from schemas.step import FailedQuery, QueryReport

STEP = "step"  # the parameter of a query, `$step`: the finished step
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


def check_step(directory: RunDirectory, step: int, queries: dict[str, str]) -> list[FailedQuery]:
    """Ask all queries about a finished step; return those that have an answer, or none can be found for."""
    failed = []
    with RunQueries([directory]) as opened:
        for name, sql in queries.items():
            try:
                table = opened.query(sql, {STEP: step} if f"${STEP}" in sql else None)
            except PipelineError as error:
                failed.append(FailedQuery(name=name, error=str(error)))
                continue
            if table.num_rows:
                rows = tuple(json.dumps(row, default=str) for row in table.slice(0, MAX_ROWS).to_pylist())
                failed.append(FailedQuery(name=name, num_rows=table.num_rows, rows=rows))
    return failed


if __name__ == "__main__":
    run, number, queries_folder = sys.argv[1:]
    found = check_step(RunDirectory(run), int(number), load_queries(queries_folder))
    print(QueryReport(failed=tuple(found)).model_dump_json())
