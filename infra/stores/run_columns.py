"""The durable columns of a run as tools read them, without Ray: each step's where the run keeps them that ran it."""

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from infra.storage.lineage import owners
from infra.storage.runs import RunDirectory
from infra.stores.chunk_files import ChunkRecord
from infra.stores.file_layout import STORE_PATH
from infra.stores.fsspec import FsspecColumnStore
from infra.stores.open import open_files
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.config.store import SharedStore
from schemas.errors import RunError, StoreError


class StoredColumns(Protocol):
    """What is read of a run's columns; see `FsspecColumnStore`."""

    run_id: str

    def steps(self) -> list[int]: ...

    def load_batch(self, step: int) -> BatchHandle | None: ...

    def records(self, step: int) -> list[ChunkRecord]: ...

    def read(self, batch: BatchHandle, columns: Sequence[str]) -> pa.RecordBatch: ...

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch: ...


class RunColumns(StoredColumns):
    """The columns of a run and, for steps before it was forked, of its ancestors. Read-only.

    Args:
        directory: The run.
    """

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
