"""The connection to a run's Ray cluster, configured or local."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flows.lifecycle.cancellation import run_until
from infra.ray import cluster
from infra.ray.actors import require_ray
from infra.services.local import LocalServices
from schemas.config.runtime import ServicesConfig

POLL_SECONDS = 2.0
SETTLE_SECONDS = 1.5 * POLL_SECONDS  # after a loss, until `while_ray_lives` knows whether Ray itself is being lost

Result = TypeVar("Result")


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
