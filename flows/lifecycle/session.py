"""What a flow needs around it when Sluice starts it: a Prefect API, readable log lines, and the run's Ray cluster."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console

from flows.lifecycle.cancellation import run_until
from flows.lifecycle.exit import deliver_events
from flows.lifecycle.outages import call_through_outages, cloud_key
from infra.ray import cluster
from infra.ray.actors import require_ray
from infra.services.local import LocalServices, prefect_kept_running
from infra.services.prefect_api import check_prefect_api
from infra.storage.driver_log import one_of_several
from schemas.config.runtime import ServicesConfig

POLL_SECONDS = 2.0
SETTLE_SECONDS = 1.5 * POLL_SECONDS  # after a loss, until `while_ray_lives` knows whether Ray itself is being lost
Result = TypeVar("Result")

OWN_PACKAGES = ("schemas", "rl_core", "infra", "tasks", "flows")
ENGINE_LOGGERS = (
    "prefect.engine",
    "prefect.flow_runs",
    "prefect.task_runs",
    "prefect.flow_engine",
    "prefect.task_engine",
)
# Of an outage of the server, which a run reports on one line; they would report each event and each batch of logs.
DELIVERY_LOGGERS = ("prefect.events", "prefect._internal", "EventsWorker", "APILogWorker")


@contextmanager
def prefect_session(config: ServicesConfig, console: Console) -> Iterator[None]:
    """Use the configured Prefect API, or a local server, which starts in parallel with the local Ray."""
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK,
        temporary_settings,
    )

    api_url = config.prefect_api_url or PREFECT_API_URL.value()
    if api_url is not None:
        check_prefect_api(api_url, PREFECT_API_AUTH_STRING.value(), cloud_key(api_url))
    services = LocalServices(Path(config.dir))
    with console.status("starting the local services"):
        services.start(prefect=api_url is None, ray=config.ray_address is None)
    api_url = api_url or services.prefect_api_url
    assert api_url is not None
    # A profile's storage of other flows' results is not needed here; a flow fails if its server lacks that block.
    others = {PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK}
    with temporary_settings({PREFECT_API_URL: api_url}, restore_defaults=others), ExitStack() as stack:
        console.print(f"Prefect UI: [bold]{api_url.removesuffix('/api')}[/bold]")
        stack.enter_context(_logged_to(console))
        if api_url == services.prefect_api_url:
            stack.enter_context(prefect_kept_running(services))
        # In a thread, where no event loop runs: Prefect would return coroutines of this one.
        deliverer = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(lambda: deliverer.submit(deliver_events, api_url).result())
        yield


def run_flow(flow: Callable[[], Awaitable[Result]], config: ServicesConfig) -> Result:
    """Run a flow to completion, through outages of the Prefect server; Ctrl-C cancels it, so that it can clean up.

    Raises:
        ServerLostError: The server did not respond again in time.
    """
    return asyncio.run(call_through_outages(flow, config.prefect_patience_seconds))


def connect(config: ServicesConfig) -> None:
    """Connect to the configured Ray cluster, or to a local one, which is started if necessary."""
    if config.ray_address:
        cluster.connect(config.ray_address, py_modules=config.py_modules, secrets=config.secrets)
        return
    services = LocalServices(Path(config.dir))
    services.start(prefect=False, ray=True)
    assert services.ray_address is not None
    cluster.connect(services.ray_address, py_modules=config.py_modules, secrets=config.secrets)
    services.announce_metrics(cluster.metrics_addresses())


async def while_ray_lives(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, which would wait for Ray in vain if Ray is lost: cancel it then.

    Raises:
        RayLostError: Ray was lost.
    """
    return await run_until(_watch_ray(), work)


async def _watch_ray() -> NoReturn:
    while True:
        await asyncio.to_thread(require_ray)
        await asyncio.sleep(POLL_SECONDS)


@contextmanager
def _logged_to(console: Console) -> Iterator[None]:
    """Print Sluice's own log lines and other packages' warnings; Prefect's state messages are only in its UI."""
    import prefect.main  # noqa: F401  sets up logging when first imported, so ours must be set up after it

    logging.raiseExceptions = False  # otherwise Prefect prints several lines for logs that the server doesn't take
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, PrefectConsoleHandler)]
    handler = _ConsoleHandler(console)
    root.addHandler(handler)
    for name in OWN_PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._own = tuple(str(Path(__file__).parents[2] / name) for name in OWN_PACKAGES)

    def emit(self, record: logging.LogRecord) -> None:
        own = record.pathname.startswith(self._own)
        if not own and record.name.startswith((*ENGINE_LOGGERS, *DELIVERY_LOGGERS)):
            return
        run = one_of_several()
        message = f"{run}: {record.getMessage()}" if run else record.getMessage()
        if record.levelno >= logging.WARNING:
            self._console.print(f"{record.levelname.lower()}: {message}", style="yellow", markup=False, soft_wrap=True)
        elif own and record.levelno == logging.INFO:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)
