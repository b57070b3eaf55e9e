"""The local services that a run needs: a Prefect server and a Ray head."""

from infra.services.local import LocalServices
from infra.services.prefect_api import prefect_responds

__all__ = ["LocalServices", "prefect_responds"]
