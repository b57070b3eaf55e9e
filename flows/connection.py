"""The connection to a run's Ray cluster, configured or local."""

from pathlib import Path

from infra.ray import cluster
from infra.services.local import LocalServices
from schemas.config.runtime import RuntimeConfig


def connect(runtime: RuntimeConfig) -> None:
    """Connect to the configured Ray cluster, or to a local one, which is started if necessary."""
    if runtime.ray_address:
        cluster.connect(runtime.ray_address, local=False)
        return
    services = LocalServices(Path(runtime.services_dir))
    services.start(prefect=False, ray=True)
    assert services.ray_address is not None
    cluster.connect(services.ray_address, local=True)
