"""Reading a run's columns from its files, without Ray, while the run is in progress and afterwards.

N rows of a step's batch.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from infra.storage.lineage import owners
from infra.storage.runs import RunDirectory
from infra.stores.chunk_files import STORE_PATH, ChunkRecord
from infra.stores.files import FsspecColumnStore
from infra.stores.open import open_files
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.config import DEFAULT_RUNS_DIR
from schemas.config.store import SharedStore
from schemas.errors import ChunkCorruptedError, RunError, StoreError


class RunColumns:
    """The columns of a run and, for steps before it was forked, of its ancestors. Read-only."""

    def __init__(self, directory: RunDirectory) -> None:
        self.run_id = directory.run_id
        # Each run with its first step, the run itself first; of one that can't be read, the reason.
        self._runs: list[tuple[int, RunDirectory, FsspecColumnStore | str]] = []
        try:
            for run, first in owners(directory):
                self._runs.append((first, run, _open(run)))
        except RunError as error:  # an ancestor is gone
            self._runs.append((0, directory, str(error)))

    @property
    def missing(self) -> str | None:
        """Why no step can be read; None if some can."""
        reasons = [found for *_, found in self._runs if isinstance(found, str)]
        return "; ".join(reasons) if len(reasons) == len(self._runs) else None

    def owner(self, step: int) -> RunDirectory:
        """Return the directory of the run that has run a step."""
        return self._find(step)[0]

    def reason(self, step: int) -> str | None:
        """Return why the columns of the run that has run a step can't be read; None if they can."""
        found = self._find(step)[1]
        return found if isinstance(found, str) else None

    def of(self, step: int) -> FsspecColumnStore:
        """Return the columns of the run that has run a step.

        Raises:
            RunError: They can't be read.
        """
        found = self._find(step)[1]
        if isinstance(found, str):
            raise RunError(found)
        return found

    def steps(self) -> list[int]:
        """Return the steps that the stores hold anything of, in order."""
        found, stop = list[int](), None
        for first, _, store in self._runs:
            own = [] if isinstance(store, str) else store.steps()
            found += [step for step in own if first <= step and (stop is None or step < stop)]
            stop = first if stop is None else min(first, stop)
        return sorted(found)

    def load_batch(self, step: int) -> BatchHandle | None:
        """Return a step's newest handle; None if there is none, or it can't be read."""
        return None if self.reason(step) else self.of(step).load_batch(step)

    def records(self, step: int) -> list[ChunkRecord]:
        """Return the records of the step's committed chunks, by key."""
        return [] if self.reason(step) else self.of(step).records(step)

    def read(self, batch: BatchHandle, columns: Sequence[str]) -> pa.RecordBatch:
        """Read columns of a step's rows; see `ColumnStore.read`."""
        return self.of(batch.step).read(batch, columns)

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch:
        """Read all rows and columns of one chunk; see `FsspecColumnStore.read_chunk`."""
        return self.of(ChunkKey.parse(ref.key).step).read_chunk(ref)

    def _find(self, step: int) -> tuple[RunDirectory, FsspecColumnStore | str]:
        return next((run, store) for first, run, store in self._runs if max(step, 0) >= first)


StoredColumns = FsspecColumnStore | RunColumns


def open_run_columns(directory: RunDirectory) -> RunColumns:
    """Open a run's durable columns for reading, those of the steps before it was forked included.

    Raises:
        RunError: None can be read: the run keeps none on disk, has none yet, or its `store.url` can't be reached.
    """
    columns = RunColumns(directory)
    if columns.missing is not None:
        raise RunError(columns.missing)
    return columns


def open_own_columns(directory: RunDirectory) -> FsspecColumnStore:
    """Open the durable columns of the steps that a run has run itself, for reading.

    Raises:
        RunError: The run keeps none on disk, has none yet, or its `store.url` can't be reached.
    """
    config = directory.config()
    if isinstance(config.store, SharedStore):
        raise RunError(
            f'run {directory.run_id} keeps no columns on disk, because its store.kind = "{config.store.kind}"; '
            'a run with store.kind = "tiered" keeps them'
        )
    if config.store.url is None and directory.folder.size(f"columns/{STORE_PATH}") is None:
        raise RunError(f"run {directory.run_id} has no columns yet: its first step creates {directory.columns}")
    try:
        return open_files(directory, config.store, read_only=True)
    except (StoreError, OSError, ImportError, ValueError) as error:  # ValueError: fsspec knows no such protocol
        place = config.store.url or directory.columns
        raise RunError(f"the columns of run {directory.run_id} in {place} can't be opened: {error}") from error


def _open(run: RunDirectory) -> FsspecColumnStore | str:
    try:
        return open_own_columns(run)
    except RunError as error:
        return str(error)


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
    """Return the steps that have a batch or a chunk, in order; one that is only open is not among them."""
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
