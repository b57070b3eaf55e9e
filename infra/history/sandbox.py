"""DuckDB for conditions that a page sends: it reads tables in memory, and no file, and has limited time and memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Timer
from typing import Any

import duckdb

from schemas.errors import PipelineError, QueryError

TIMEOUT_SECONDS = 10.0
OPTIONS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # a name in a query is never a variable of this process
    "enable_external_access": False,
    "lock_configuration": True,
    "memory_limit": "2GB",
    "temp_directory": "",
}


@contextmanager
def sandbox(views: Mapping[str, Any], timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection whose queries see only these views, and are stopped after a time.

    Args:
        views: Arrow tables or datasets, by name.
        timeout_seconds: For all queries together.

    Raises:
        QueryError: DuckDB rejects a query, or it took too long.
    """
    connection = duckdb.connect(config=OPTIONS)
    for name, view in views.items():
        connection.register(name, view)
    timer = Timer(timeout_seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield connection
    except duckdb.InterruptException:
        raise QueryError(f"the condition took longer than {timeout_seconds:g} s and was stopped") from None
    except duckdb.Error as error:
        failures = (getattr(view, "failure", None) for view in views.values())
        if (failure := next((found for found in failures if isinstance(found, PipelineError)), None)) is not None:
            raise failure.with_traceback(None) from None
        raise QueryError(" ".join(str(error).split())) from None
    finally:
        timer.cancel()
        connection.close()
