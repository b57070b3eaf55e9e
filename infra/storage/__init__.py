"""Run directories, and what is in them: config, ledger, plans, metrics."""

from infra.storage.ledger import Ledger
from infra.storage.run_files import MetricsFile
from infra.storage.runs import RunDirectory, new_run_id

__all__ = ["Ledger", "MetricsFile", "RunDirectory", "new_run_id"]
