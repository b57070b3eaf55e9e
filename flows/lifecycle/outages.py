"""Outages of the Prefect server: calls wait until it responds again, and what is only shown in the UI is left out."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, PREFECT_CLOUD_API_URL

from infra.services.prefect_api import prefect_responds
from schemas.errors import PipelineError, ServerLostError, first_line

POLL_SECONDS = 1.0
MAX_OUTAGES = 5  # during one call

API_ERRORS = (httpx.TransportError, PrefectHTTPStatusError)  # Prefect's client raises them after its own retries

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")


async def call_through_outages(
    call: Callable[[], Awaitable[Result]],
    patience_seconds: float,
    find_result: Callable[[], Result | None] = lambda: None,
) -> Result:
    """Await a flow; if it fails because the Prefect server doesn't respond, wait for the server and call it again.

    Args:
        call: Calls the flow, which must be safe to repeat.
        patience_seconds: Longest wait for the server.
        find_result: Returns the flow's result if only the report of its end was lost, so that it isn't repeated.

    Raises:
        ServerLostError: The server did not respond in time, or failed again and again.
        PipelineError: The flow raised it, and then the server could not be told.
    """
    for _ in range(MAX_OUTAGES):
        try:
            return await call()
        except API_ERRORS as error:
            if (cause := _own_error(error)) is not None:
                raise cause from None
            if not _is_outage(error):
                raise
            last = error
        await _wait_for_server(patience_seconds, last)
        if (result := find_result()) is not None:
            return result
    raise ServerLostError(
        f"the Prefect server at {_api_url()} responds, but failed {MAX_OUTAGES} times in a row: {first_line(last)}"
    )


def shown_in_ui(call: Callable[P, Coroutine[Any, Any, Result]]) -> Callable[P, Coroutine[Any, Any, Result | None]]:
    """Return a call that only adds to the UI, so that it warns and returns None if the Prefect server fails."""

    @functools.wraps(call)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> Result | None:
        try:
            return await call(*args, **kwargs)
        except API_ERRORS as error:
            logger.warning("the Prefect UI lacks an artifact, as %s failed: %s", call.__name__, first_line(error))
            return None

    return guarded


def cloud_key(api_url: str) -> str | None:
    """Return the API key if `api_url` is Prefect Cloud's; other servers have a login instead."""
    is_cloud = api_url.startswith(str(PREFECT_CLOUD_API_URL.value()))
    return str(PREFECT_API_KEY.value() or "") if is_cloud else None


async def _wait_for_server(patience_seconds: float, error: Exception) -> None:
    url, started = _api_url(), time.monotonic()
    logger.warning(
        "the Prefect server at %s doesn't respond (%s); waiting %g s at most (services.prefect_patience_seconds)",
        url,
        first_line(error),
        patience_seconds,
    )
    while not await asyncio.to_thread(prefect_responds, url, cloud_key(url)):
        if time.monotonic() - started > patience_seconds:
            raise ServerLostError(
                f"the Prefect server at {url} has not responded for {patience_seconds:g} s "
                f"(services.prefect_patience_seconds): {first_line(error)}"
            ) from error
        await asyncio.sleep(POLL_SECONDS)
    logger.warning("the Prefect server responds; the run goes on")


def _is_outage(error: Exception) -> bool:
    """Return whether the server was away or overloaded; other answers would be the same the next time."""
    return not isinstance(error, PrefectHTTPStatusError) or error.response.is_server_error


def _own_error(error: BaseException | None) -> PipelineError | None:
    """Return the flow's own error, if it was during the report of that one that the server failed."""
    while error is not None and not isinstance(error, PipelineError):
        error = error.__context__
    return error


def _api_url() -> str:
    return str(PREFECT_API_URL.value())
