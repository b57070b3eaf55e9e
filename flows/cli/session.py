"""The environment in which a command runs a flow: a Prefect API, and readable log lines in the terminal."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console

from infra.services.local import LocalServices, prefect_responds
from schemas.config.runtime import RuntimeConfig
from schemas.errors import ServiceError

Result = TypeVar("Result")

OWN_PACKAGES = ("schemas", "rl_core", "infra", "tasks", "flows")
ENGINE_LOGGERS = (
    "prefect.engine",
    "prefect.flow_runs",
    "prefect.task_runs",
    "prefect.flow_engine",
    "prefect.task_engine",
)


@contextmanager
def prefect_session(runtime: RuntimeConfig, console: Console) -> Iterator[None]:
    """Use the configured Prefect API, or a local server, which starts in parallel with the local Ray."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    api_url = runtime.prefect_api_url or PREFECT_API_URL.value()
    if api_url is not None and not prefect_responds(api_url):
        raise ServiceError(
            f"no Prefect API responds at {api_url}; check runtime.prefect_api_url and PREFECT_API_URL, or unset both "
            "to start a local server"
        )
    services = LocalServices(Path(runtime.services_dir))
    with console.status("starting the local services"):
        services.start(prefect=api_url is None, ray=runtime.ray_address is None)
    api_url = api_url or services.prefect_api_url
    with temporary_settings({PREFECT_API_URL: api_url}):
        console.print(f"Prefect UI: [bold]{str(api_url).removesuffix('/api')}[/bold]")
        _log_to(console)
        yield


def run_flow(flow_run: Coroutine[Any, Any, Result]) -> Result:
    """Run a flow to completion; Ctrl-C cancels it, so that it can clean up."""
    return asyncio.run(flow_run)


def _log_to(console: Console) -> None:
    """Print Sluice's own log lines and other packages' warnings; Prefect's state messages are only in its UI."""
    import prefect.main  # noqa: F401  sets up logging when first imported, so ours must be set up after it

    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, PrefectConsoleHandler)]
    root.addHandler(_ConsoleHandler(console))
    for name in OWN_PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._own = tuple(str(Path(__file__).parents[2] / name) for name in OWN_PACKAGES)

    def emit(self, record: logging.LogRecord) -> None:
        own = record.pathname.startswith(self._own)
        if not own and record.name.startswith(ENGINE_LOGGERS):
            return
        if record.levelno >= logging.WARNING:
            self._console.print(
                f"{record.levelname.lower()}: {record.getMessage()}", style="yellow", markup=False, soft_wrap=True
            )
        elif own and record.levelno == logging.INFO:
            self._console.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True)
