"""Log lines of Sluice's packages and of workers in the Prefect UI, at the task run or flow run that they belong to."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from infra.ray.worker_logs import OWN_PACKAGES


@contextmanager
def logs_in_prefect() -> Iterator[None]:
    """Send log lines that are written during the block, or come from a worker, to the run in whose context they are.

    Tasks and flows log by `get_run_logger()`; this is for what is below them, which knows no Prefect.
    """
    handler = APILogHandler()
    handler.addFilter(_is_of_a_run)
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _is_of_a_run(record: logging.LogRecord) -> bool:
    is_ours = record.name.partition(".")[0] in OWN_PACKAGES or hasattr(record, "worker")
    return is_ours and (TaskRunContext.get() or FlowRunContext.get()) is not None
