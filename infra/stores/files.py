"""A column store of Arrow IPC files under any fsspec URL, for all processes that can reach it.

An empty file says that a step is open. A replay's store is over it: what it puts, over the columns of the run that it
replays, which it only reads.
"""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa

from infra.storage.folder import Folder
from infra.storage.ledger import step_folder
from infra.stores.base import (
    ColumnStore,
    capacity_error,
    check_incarnation,
    check_same_content,
    chunk_not_found_error,
    step_not_open_error,
)
from infra.stores.chunk_files import (
    OPEN_STEPS,
    STORE_PATH,
    ChunkBlocks,
    ChunkFiles,
    ChunkRecord,
    StoreRecord,
    batch_path,
    load_record,
    open_path,
    opened_step,
)
from infra.stores.chunk_reads import ChunkRead, name_chunk_in_errors
from rl_core.columns.codec import Compression, decode, encode, encoded_bytes
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, StoreUsage
from schemas.errors import RunError, StepNotOpenError, StoreError

_POLL_SECONDS = 0.2
_VERIFY_THREADS = 16
NO_LIMIT = 2**63 - 1  # bytes


class FsspecColumnStore(ColumnStore):
    """One run's columns as files. Every process makes its own client; the files are all that the clients share.

    Args:
        run_id: The run whose columns these are.
        url: The folder of this run's columns, any fsspec URL or a local path.
        capacity_bytes: The limit on the bytes of all open steps together; simultaneous puts may exceed it together.
        put_timeout_seconds: How long a put waits for other steps to be cleared.
        storage_options: Options that fsspec passes to the file system.
        compression: That of the files that this client writes. References count bytes as if there were none.
        read_only: Whether to leave all files as they are; the folder must then be a store already.

    Raises:
        RunError: The folder holds another run's columns.
        StoreError: It holds none, and `read_only` is set.
    """

    def __init__(
        self,
        run_id: str,
        url: str,
        capacity_bytes: int = NO_LIMIT,
        *,
        put_timeout_seconds: float = 60.0,
        storage_options: dict[str, Any] | None = None,
        compression: Compression | None = None,
        read_only: bool = False,
    ) -> None:
        super().__init__(run_id)
        self._folder = Folder(url, storage_options or {})
        self._files = ChunkFiles(self._folder)
        self._capacity_bytes, self._put_timeout = capacity_bytes, put_timeout_seconds
        self._peak_bytes, self._compression = 0, compression
        self.incarnation = self._claim_folder(read_only).incarnation

    def open(self, step: int) -> None:
        self._folder.write(open_path(step), b"")

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        found, wanted = self._files.find_all([self._key(ref) for ref in refs]), set(refs)
        held = [record for record in found if record.ref in wanted]
        self._files.delete(held)
        return sum(record.ref.num_bytes for record in held)

    def clear(self, step: int) -> int:
        freed = self._files.bytes_by_step(step_folder(step))[step]  # a damaged record must not keep its chunk
        self.archive(step)
        self._files.clear(step)
        self._folder.remove_folder(step_folder(step))  # a late writer finds the step closed, and removes its own files
        return freed

    def archive(self, step: int) -> None:
        self._folder.remove(open_path(step))

    def drop_leftovers(self, step: int) -> None:
        self._files.drop_leftovers(step)

    def steps(self) -> list[int]:
        return sorted({*self._files.steps(), *self.open_steps()})

    def open_steps(self) -> list[int]:
        return sorted(step for path in self._folder.sizes(OPEN_STEPS) if (step := opened_step(path)) is not None)

    def bytes_by_step(self) -> dict[int, int]:
        return self._files.bytes_by_step()

    def shared_bytes_by_step(self) -> dict[int, int]:
        """Return the bytes of those of each step's chunks that another run has, too: by hard links."""
        return self._files.bytes_by_step(only_linked=True)

    def chunks(self, step: int) -> list[ChunkRef]:
        return [record.ref for record in self.records(step)]

    def save_batch(self, batch: BatchHandle) -> None:
        self._folder.write(batch_path(batch.step), batch.model_dump_json().encode())

    def load_batch(self, step: int) -> BatchHandle | None:
        return load_record(self._folder, batch_path(step), BatchHandle)

    def records(self, step: int) -> list[ChunkRecord]:
        """Return the records of the step's committed chunks, by key."""
        return self._files.records(step)

    def usage(self) -> StoreUsage:
        """See `ColumnStore.usage`. The peak is the highest that this client saw in its own puts."""
        open_steps = self.open_steps()
        held = [ref for step in open_steps for ref in self.chunks(step)]
        num_bytes = sum(ref.num_bytes for ref in held)
        return StoreUsage(
            num_chunks=len(held),
            num_rows=sum(ref.num_rows for ref in held),
            num_bytes=num_bytes,
            peak_bytes=max(self._peak_bytes, num_bytes),
            capacity_bytes=self._capacity_bytes,
            open_steps=tuple(open_steps),
        )

    def verify(self, batch: BatchHandle) -> None:
        with ThreadPoolExecutor(_VERIFY_THREADS) as threads:  # object stores take their time for each of many chunks
            for _ in threads.map(self._check, batch.chunks):
                pass

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch:
        """Read all rows and columns of one chunk.

        Raises:
            ChunkNotFoundError: It does not exist.
            ChunkCorruptedError: It is damaged.
        """
        data = self._load(ref)
        with name_chunk_in_errors(ref):
            return decode(data)

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        self._require_open(key)
        if self._files.find(key):
            return self._check_repeated(key, columns)
        data = encode(columns, self._compression)
        self._wait_for_capacity(key, data.size)
        size = data.size if self._compression is None else encoded_bytes(columns)
        ref = ChunkRef(key=str(key), num_rows=columns.num_rows, num_bytes=size, incarnation=self.incarnation)
        try:
            self._files.write(ref, data, is_compressed=self._compression is not None)
        except FileExistsError:
            return self._check_repeated(key, columns)
        try:
            self._require_open(key)
        except StepNotOpenError:  # it was cleared in the meantime
            self.delete([ref])
            raise
        return ref

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        return [self._fetch_rows(read) for read in reads]

    def _fetch_rows(self, read: ChunkRead) -> pa.RecordBatch:
        blocks = self._open_chunk(read.ref)
        with name_chunk_in_errors(read.ref):
            if not blocks.is_loaded:
                for part in read.parts:
                    blocks.load_rows(part.names, part.starts, part.stops)
            return decode(blocks.buffer, read.names)

    def _check(self, ref: ChunkRef) -> None:
        self.read_chunk(ref)

    def _load(self, ref: ChunkRef) -> pa.Buffer:
        """Return all of a chunk's bytes, checked."""
        blocks = self._open_chunk(ref)
        with name_chunk_in_errors(ref):
            blocks.load_all()
        return blocks.buffer

    def _open_chunk(self, ref: ChunkRef) -> ChunkBlocks:
        """Return a chunk's bytes, without loading any of them, unless they are compressed."""
        check_incarnation(ref, self.incarnation)
        record = self._files.find(self._key(ref))
        if record is None:
            raise chunk_not_found_error(ref)
        return self._files.open(record, ref)

    def _check_repeated(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        record = self._files.find(key)
        if record is None:
            raise step_not_open_error(key)  # it existed a moment ago: the step is being cleared
        return check_same_content(record.ref, decode(self._load(record.ref)), columns)

    def _wait_for_capacity(self, key: ChunkKey, num_bytes: int) -> None:
        if self._capacity_bytes == NO_LIMIT:
            return
        deadline = time.monotonic() + self._put_timeout
        while True:
            held = {step: self._files.bytes_by_step(step_folder(step))[step] for step in self.open_steps()}
            total = sum(held.values())
            if total + num_bytes <= self._capacity_bytes:
                self._peak_bytes = max(self._peak_bytes, total + num_bytes)
                return
            fits_alone = held.get(key.step, 0) + num_bytes <= self._capacity_bytes
            if not fits_alone or time.monotonic() > deadline:
                raise capacity_error(key, num_bytes, total, self._capacity_bytes)
            time.sleep(_POLL_SECONDS)
            self._require_open(key)

    def _require_open(self, key: ChunkKey) -> None:
        if self._folder.size(open_path(key.step)) is None:
            raise step_not_open_error(key)

    def _claim_folder(self, read_only: bool) -> StoreRecord:
        """Return the folder's own record; the first client writes it."""
        new = StoreRecord(run_id=self.run_id, incarnation=uuid.uuid4().hex)
        found = load_record(self._folder, STORE_PATH, StoreRecord)
        if found is None and read_only:
            raise StoreError(f"{self._folder} holds no columns")
        if found is None:
            with suppress(FileExistsError):
                self._folder.create(STORE_PATH, new.model_dump_json().encode())
            found = load_record(self._folder, STORE_PATH, StoreRecord) or new
        require_own(found, self.run_id, str(self._folder))
        return found

    def _key(self, ref: ChunkRef) -> ChunkKey:
        key = ChunkKey.parse(ref.key)
        self._check_run(key)
        return key


def require_own(record: StoreRecord, run_id: str, place: str) -> None:
    """Check that the columns in a place, which has this record, are the run's.

    Raises:
        RunError: They are another one's, or the run's directory has another name than when they were written.
    """
    if record.run_id != run_id:
        raise RunError(
            f"{place} holds the columns of run {record.run_id}, expected {run_id}: they are named by the run's id, "
            f"which is its directory's name; name the directory {record.run_id} (a copy: in another folder of runs), "
            f"or make a run from it: sluice fork {record.run_id} --at STEP --run-id {run_id}"
        )


class ReplayColumnStore(FsspecColumnStore):
    """A run's files, over another run's. A chunk belongs to the run whose store's incarnation its reference names.

    Args:
        run_id: The replay's own id, of which the chunks are that it puts.
        url: The folder of its own columns.
        source: The columns of the run that it replays, read-only.
    """

    def __init__(self, run_id: str, url: str, source: FsspecColumnStore) -> None:
        super().__init__(run_id, url)
        self.source = source

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch:
        return self.source.read_chunk(ref) if self._is_of_source(ref) else super().read_chunk(ref)

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        own = super()._fetch
        return [(self.source._fetch if self._is_of_source(read.ref) else own)([read])[0] for read in reads]

    def _check_run(self, key: ChunkKey) -> None:
        if key.run_id != self.source.run_id:
            super()._check_run(key)

    def _is_of_source(self, ref: ChunkRef) -> bool:
        return ref.incarnation == self.source.incarnation
