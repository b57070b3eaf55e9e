"""A step's columns over their lifetime: opened under a lease, extended by each stage, kept or cleared at the end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import reduce
from operator import add

from infra.storage.ledger import FORMAT
from infra.storage.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store, start_store
from schemas.batch import BatchHandle
from schemas.config.run import RunConfig
from schemas.errors import PipelineError, StoreError
from schemas.step import RunHandle, StoredBatch
from schemas.store import StoreTraffic

RENEWALS_PER_LEASE = 4

logger = logging.getLogger(__name__)


def open_step(run: RunHandle, step: int) -> None:
    """Open the step's lease. If the step was started before and its columns are lost, drop its ledger entries too."""
    store = open_store(run)
    store.open_lease(step)
    if (batch := store.load_batch(step)) is None:
        return
    try:
        store.verify(batch)
    except StoreError as error:
        logger.warning("step %d is run again from its start: %s", step, error)
        RunDirectory.of(run).ledger.drop_step(step)
        store.clear(step)
        store.open_lease(step)


@asynccontextmanager
async def renewed_lease(run: RunHandle, step: int) -> AsyncIterator[None]:
    """Renew the step's lease periodically for as long as this process works on the step."""

    async def renew_forever() -> None:
        try:
            while True:
                await asyncio.sleep(run.config.store.lease_seconds / RENEWALS_PER_LEASE)
                open_store(run).open_lease(step)
        except PipelineError as error:  # the stages get the same error, and raise it
            logger.warning("the lease of step %d is no longer renewed: %s", step, error)

    renewal = asyncio.create_task(renew_forever())
    try:
        yield
    finally:
        renewal.cancel()
        with suppress(asyncio.CancelledError):
            await renewal


def publish_handle(store: ColumnStore, batch: BatchHandle, traffic: Sequence[StoreTraffic]) -> StoredBatch:
    """Save a stage's batch as the step's newest handle; return it with the stage's total traffic."""
    store.save_batch(batch)
    return StoredBatch(batch=batch, traffic=reduce(add, traffic, StoreTraffic()))


def clear_step(run: RunHandle, step: int) -> int:
    """Free the step's columns; return the bytes freed. Clearing twice is harmless.

    The ledger's entries go first, so that none outlives its columns.
    """
    _drop_records(RunDirectory.of(run), step)
    return open_store(run).clear(step)


def archive_step(run: RunHandle, step: int) -> None:
    """End a finished step's lease.

    A durable store keeps its columns, and the ledger its entries, until a checkpoint includes its update.
    """
    if not run.config.store.is_durable:
        _drop_records(RunDirectory.of(run), step)
    open_store(run).archive(step)


def drop_outdated_steps(directory: RunDirectory, config: RunConfig, first: int) -> bool:
    """If the run's ledger is of an older format, drop the steps from `first` on, so that they are run again.

    Their columns, their plans and all of the ledger's entries are deleted; then the ledger has this version's format.
    The column store is started again, as an older version may have left its registry behind. For the same reason the
    run's workers must be killed before it is resumed; besides, they may be ahead of the checkpoint.

    Args:
        directory: The run, which no driver may be driving.
        config: Its config.
        first: The version of the newest complete checkpoint, which includes the steps before; 0 if there is none.

    Returns:
        Whether the ledger was of an older format.

    Raises:
        RunError: The ledger is of a newer format.
    """
    if not directory.ledger.is_outdated():
        return False
    logger.warning(
        "run %s has a ledger of format %d, this Sluice writes format %d: the steps after checkpoint %d are run again",
        directory.run_id,
        directory.ledger.format(),
        FORMAT,
        first,
    )
    start_store(directory, config)[0].close()
    store, _ = start_store(directory, config)
    for step in {*directory.ledger.steps(), *store.steps()}:
        if step >= first:
            directory.plans.drop(step)
            store.clear(step)
    directory.ledger.renew()
    return True


def sweep_steps(run: RunHandle, first: int) -> None:
    """Clear the steps before `first`, the first one that may still be run.

    The last `store.keep_steps` of them stay readable.
    """
    directory, store = RunDirectory.of(run), open_store(run)
    for step in sorted({*directory.ledger.steps(), *store.steps()}):
        if step < first - run.config.store.keep_steps:
            _drop_records(directory, step)
            store.clear(step)
        elif step < first:
            directory.ledger.drop_step(step)
            store.archive(step)


def _drop_records(directory: RunDirectory, step: int) -> None:
    """Delete a step's ledger entries and its plan."""
    directory.ledger.drop_step(step)
    directory.plans.drop(step)
