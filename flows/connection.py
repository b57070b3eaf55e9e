"""The Ray cluster that a run works on: the configured one, or a local one."""

from pathlib import Path

from infra.ray import cluster
from infra.services.local import LocalServices
from schemas.config.runtime import RuntimeConfig


def connect(runtime: RuntimeConfig) -> None:
    """Connect to the configured Ray, or to a local one that is started if need be."""
    if runtime.ray_address:
        cluster.connect(runtime.ray_address, local=False)
        return
    services = LocalServices(Path(runtime.services_dir))
    services.start(prefect=False, ray=True)
    assert services.ray_address is not None
    cluster.connect(services.ray_address, local=True)
