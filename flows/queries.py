"""The saved queries that a run asks after each step."""

import asyncio
import sys
from contextlib import suppress

from infra.storage.runs import RunDirectory
from schemas.step import FailedQuery, QueryReport, RunHandle

LIMIT_SECONDS = 300.0  # for all queries of a step


async def find_failed_queries(run: RunHandle, step: int) -> tuple[FailedQuery, ...]:
    """Return the queries of `runtime.queries` that say what is wrong with a finished step; none without that setting.

    They run in a process of their own. One that dies or takes too long is itself what is wrong.
    """
    folder = run.config.runtime.queries
    if folder is None:
        return ()
    command = [sys.executable, "-P", "-m", "infra.history.checks", RunDirectory.of(run).url, str(step), folder]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        answer, errors = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
    except TimeoutError:
        return (FailedQuery(name=folder, error=f"no answer within {LIMIT_SECONDS:g} s"),)
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return (FailedQuery(name=folder, error=last or f"exit code {process.returncode}"),)
    return QueryReport.model_validate_json(answer).failed
