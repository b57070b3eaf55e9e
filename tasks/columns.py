"""A step's columns: opened under a lease, noted as they grow, kept or cleared at its end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import reduce
from operator import add

from prefect import get_run_logger

from infra.runs import RunDirectory
from infra.stores.base import ColumnStore
from infra.stores.open import open_store
from schemas.batch import BatchHandle
from schemas.errors import PipelineError, StoreError
from schemas.step import RunHandle, StoredBatch
from schemas.store import StoreTraffic, StoreUsage
from tasks.stage import operation

RENEWALS_PER_LEASE = 4


@operation("lease")
async def open_columns(run: RunHandle, step: int) -> None:
    """Open the step's lease. Of a step that was begun before, stages whose columns are lost are forgotten."""
    store = open_store(run)
    store.open_lease(step)
    if (batch := store.load_batch(step)) is None:
        return
    try:
        store.verify(batch)
    except StoreError as error:
        get_run_logger().warning("step %d is run from its start: %s", step, error)
        RunDirectory.of(run).forget_step(step)
        store.clear(step)
        store.open_lease(step)


@asynccontextmanager
async def renewed_lease(run: RunHandle, step: int) -> AsyncIterator[None]:
    """Renew the step's lease from time to time, so that it lasts as long as this process works on the step."""

    async def renew_forever() -> None:
        try:
            while True:
                await asyncio.sleep(run.config.store.lease_seconds / RENEWALS_PER_LEASE)
                open_store(run).open_lease(step)
        except PipelineError as error:  # the stages meet the same, and tell it to those who can act
            get_run_logger().warning("the lease of step %d is no longer renewed: %s", step, error)

    renewal = asyncio.create_task(renew_forever())
    try:
        yield
    finally:
        renewal.cancel()
        with suppress(asyncio.CancelledError):
            await renewal


def note_batch(store: ColumnStore, batch: BatchHandle, traffic: Sequence[StoreTraffic]) -> StoredBatch:
    """A stage's result: its batch, which people now find by its step, and all that was moved for it."""
    store.save_batch(batch)
    return StoredBatch(batch=batch, traffic=reduce(add, traffic, StoreTraffic()))


@operation("clear")
async def clear_columns(run: RunHandle, step: int) -> int:
    """Free the step's columns; returns the bytes freed. Clearing twice is harmless.

    The ledger's entries go first, so that none outlives its columns.
    """
    RunDirectory.of(run).forget_step(step)
    RunDirectory.of(run).forget_plan(step)
    return open_store(run).clear(step)


@operation("archive")
async def archive_columns(run: RunHandle, step: int) -> None:
    """End a finished step's lease.

    A durable store keeps its columns, and the ledger its stages, until a checkpoint makes them needless.
    """
    if not run.config.store.is_durable:
        RunDirectory.of(run).forget_step(step)
        RunDirectory.of(run).forget_plan(step)
    open_store(run).archive(step)


def store_usage(run: RunHandle) -> StoreUsage:
    """What the run's store holds now."""
    return open_store(run).usage()


async def sweep_columns(run: RunHandle, first: int) -> None:
    """Clear what is left of the steps before `first`, which is the next that may be run.

    The last `store.keep_steps` of them stay readable.
    """
    directory, store = RunDirectory.of(run), open_store(run)
    for step in sorted({*directory.ledger_steps(), *store.steps()}):
        if step < first - run.config.store.keep_steps:
            await clear_columns(run, step)
        elif step < first:
            directory.forget_step(step)
            store.archive(step)
