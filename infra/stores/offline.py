"""Reading a run's columns from its files, without Ray, while the run is in progress and afterwards.

N rows of a step's batch.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from infra.storage.runs import RunDirectory
from infra.stores.run_columns import RunColumns, StoredColumns, open_run_columns
from schemas.batch import BatchHandle
from schemas.config.folders import DEFAULT_RUNS_DIR
from schemas.errors import ChunkCorruptedError, RunError


def read_step(
    run: str | Path, step: int | None = None, columns: Sequence[str] | None = None, *, runs_dir: str = DEFAULT_RUNS_DIR
) -> pa.Table:
    """Read the rows of one step: exactly those of its newest batch, in their order.

    Until the advantages are computed, these are all rows of the rollout; afterwards, those whose reward did not fail.

    Args:
        run: A run's directory, or its id.
        step: Counted from 0; the newest step with a batch if not given.
        columns: Names from the catalog, in the order wanted; all that have been produced if not given.
        runs_dir: The folder in which to look for a run id.

    Returns:
        A table of N rows. A `row` column has one value per row, a `prompt` or `response` column a `large_list` with
        one value per token of the sample. If nothing was selected, columns are views of the files.

    Raises:
        RunError: There is no such run, it keeps no columns on disk, or the step has no batch.
        ColumnNotFoundError: The step does not have such a column, or not yet.
        ChunkNotFoundError: The step was cleared in the meantime.
        ChunkCorruptedError: A file is damaged.
        ValueError: No column is named, or one is named twice.
    """
    directory = RunDirectory.open(str(run), runs_dir)
    store = open_run_columns(directory)
    batch = find_batch(directory, store, step)
    return pa.Table.from_batches([store.read(batch, batch.columns if columns is None else columns)])


def find_batch(directory: RunDirectory, store: RunColumns, step: int | None) -> BatchHandle:
    """Return the batch of a step or, for None, of the newest one that has a batch.

    Raises:
        RunError: It has none; the message lists the steps that have columns.
    """
    for candidate in reversed(store.steps()) if step is None else [step]:
        if (batch := store.load_batch(candidate)) is not None:
            return batch
    raise _no_columns_error(directory, store, step)


def find_step(directory: RunDirectory, store: RunColumns, step: int | None) -> int:
    """Return the step itself or, for None, the newest one that has columns.

    Raises:
        RunError: It has none; the message lists the steps that have.
    """
    for candidate in reversed(store.steps()) if step is None else [step]:
        if _has_columns(store, candidate):
            return candidate
    raise _no_columns_error(directory, store, step)


def steps_with_columns(store: StoredColumns) -> list[int]:
    """Return the steps that have a batch or a chunk, in order; one that only has a lease is not among them."""
    return [step for step in store.steps() if _has_columns(store, step)]


def _has_columns(store: StoredColumns, step: int) -> bool:
    try:
        return store.load_batch(step) is not None or bool(store.records(step))
    except ChunkCorruptedError:
        return True  # they exist, though they are damaged


def _no_columns_error(directory: RunDirectory, store: RunColumns, step: int | None) -> RunError:
    if step is not None and (reason := store.reason(step)):
        return RunError(reason)
    steps = steps_with_columns(store)
    having = ", ".join(map(str, steps)) or "none"
    if step is not None and (owner := store.owner(step)).url != directory.url:
        return RunError(
            f"step {step} of run {directory.run_id} has no columns, as run {owner.run_id}, which it was forked from, "
            f"kept none of it; steps that have: {having}"
        )
    if step is None or not steps:
        kept = json.dumps(directory.config().store.keep_steps)
        unfinished = f"; step {steps[-1]} has its first chunks, but no batch yet" if steps else ""
        return RunError(
            f"run {directory.run_id} has no step with columns{unfinished}; the newest finished steps keep theirs: "
            f"store.keep_steps = {kept}"
        )
    if step in steps:
        return RunError(f"step {step} of run {directory.run_id} has chunks, but no batch before its put stage is done")
    return RunError(f"step {step} of run {directory.run_id} has no columns; steps that have: {having}")
