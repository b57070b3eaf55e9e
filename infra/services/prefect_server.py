"""Prefect's command, for a server on SQLite: its write transactions wait for one another instead of failing.

Prefect begins them with BEGIN DEFERRED. Such a transaction that reads before it writes fails at once with "database is
locked" if another one has written in between, however long SQLite's busy timeout is; the server then responds 503, and
the client waits for two seconds or more. Begun with BEGIN IMMEDIATE, it waits for its turn, which takes milliseconds.

This file is run as a script, with the arguments of `prefect`.
"""

import runpy
from typing import Any

from sqlalchemy import Engine, event


@event.listens_for(Engine, "before_cursor_execute", retval=True)
def _begin_immediate(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> tuple[str, Any]:
    return ("BEGIN IMMEDIATE" if statement == "BEGIN DEFERRED" else statement), parameters


if __name__ == "__main__":
    runpy.run_module("prefect", run_name="__main__")
