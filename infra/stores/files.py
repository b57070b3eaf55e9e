"""A column store of Arrow IPC files under any fsspec URL, for all processes that can reach it.

Its leases are one small file per step. A replay's store is over it: what it puts, over the columns of the run that it
replays, which it only reads.
"""

import time
import uuid
from collections.abc import Callable, Sequence
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
    lease_expired_error,
    no_lease_error,
)
from infra.stores.blocks import ChunkBlocks
from infra.stores.chunk_files import (
    LEASES,
    STORE_PATH,
    ChunkFiles,
    ChunkRecord,
    batch_path,
    lease_path,
    leased_step,
    load_record,
)
from infra.stores.chunk_reads import ChunkRead, name_chunk_in_errors
from rl_core.columns.codec import Compression, decode, encode, encoded_bytes
from schemas.base import Frozen
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.errors import StoreError
from schemas.store import StoreUsage

_POLL_SECONDS = 0.2
NO_LIMIT = 2**63 - 1  # bytes
NO_EXPIRY_SECONDS = 1e10


class Lease(Frozen):
    """A step's permission to put. Once it is marked as expired, the step's chunks are freed."""

    until: float  # seconds since 1970
    expired: bool = False


class FileLeases:
    """The leases of one store's steps. An archived step has none.

    Args:
        folder: The store's folder.
        lease_seconds: How long a lease lasts unless it is renewed.
        clock: Returns the time in seconds, the same in all processes that use the store.
    """

    def __init__(self, folder: Folder, lease_seconds: float, clock: Callable[[], float]) -> None:
        self._folder, self._lease_seconds, self._clock = folder, lease_seconds, clock

    def find(self, step: int) -> Lease | None:
        """Return the step's lease; None if it has none."""
        return load_record(self._folder, lease_path(step), Lease)

    def steps(self) -> list[int]:
        """Return the steps that have a lease, in order."""
        return sorted(step for path in self._folder.sizes(LEASES) if (step := leased_step(path)) is not None)

    def is_expired(self, step: int) -> bool:
        """Return whether the step's lease is marked as expired."""
        lease = self.find(step)
        return lease is not None and lease.expired

    def is_overdue(self, lease: Lease) -> bool:
        """Return whether a lease's time is up, so that the next sweep frees its step."""
        return lease.until < self._clock()

    def renew(self, step: int) -> None:
        """Open the step's lease, or renew it."""
        self._write(step, Lease(until=self._clock() + self._lease_seconds))

    def renew_if_open(self, step: int) -> None:
        """Renew the step's lease if it is open and half of its time is over."""
        lease = self.find(step)
        if lease is not None and not lease.expired:
            self._renew_past_half(step, lease)

    def require(self, key: ChunkKey) -> None:
        """Check that a key's step has an open lease; renew it if half of its time is over.

        Raises:
            LeaseError: The lease is not open.
            LeaseExpiredError: It was not renewed in time.
        """
        lease = self.find(key.step)
        if lease is None:
            raise no_lease_error(key)
        if lease.expired:
            raise lease_expired_error(key, self._lease_seconds)
        self._renew_past_half(key.step, lease)

    def close(self, step: int) -> None:
        """Remove the step's lease, if it has one."""
        self._folder.remove(lease_path(step))

    def expire(self) -> list[int]:
        """Mark the leases whose time is up as expired; return their steps."""
        expired = []
        for step in self.steps():
            lease = self.find(step)
            if lease is not None and not lease.expired and self.is_overdue(lease):
                self._write(step, lease.replace(expired=True))
                expired.append(step)
        return expired

    def _renew_past_half(self, step: int, lease: Lease) -> None:
        if lease.until - self._clock() < self._lease_seconds / 2:
            self.renew(step)

    def _write(self, step: int, lease: Lease) -> None:
        self._folder.write(lease_path(step), lease.model_dump_json().encode())


class StoreRecord(Frozen):
    """The store that a folder holds."""

    run_id: str
    incarnation: str


class FsspecColumnStore(ColumnStore):
    """One run's columns as files. Every process makes its own client; the files are all that the clients share.

    Args:
        run_id: The run whose columns these are.
        url: The folder of this run's columns, any fsspec URL or a local path.
        capacity_bytes: The limit on the bytes of all leased steps together; simultaneous puts may exceed it together.
        put_timeout_seconds: How long a put waits for other steps to be cleared.
        lease_seconds: How long a lease lasts unless it is renewed.
        storage_options: Options that fsspec passes to the file system.
        compression: That of the files that this client writes. References count bytes as if there were none.
        read_only: Whether to leave all files as they are; the folder must then be a store already.
        clock: Returns the time in seconds, by which leases expire; the same in all processes that use the store.

    Raises:
        StoreError: The folder holds another run's columns, or none and `read_only` is set.
    """

    def __init__(
        self,
        run_id: str,
        url: str,
        capacity_bytes: int = NO_LIMIT,
        *,
        put_timeout_seconds: float = 60.0,
        lease_seconds: float = 3600.0,
        storage_options: dict[str, Any] | None = None,
        compression: Compression | None = None,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(run_id)
        self._folder, self._read_only = Folder(url, storage_options or {}), read_only
        self._files, self._leases = ChunkFiles(self._folder), FileLeases(self._folder, lease_seconds, clock)
        self._capacity_bytes, self._put_timeout = capacity_bytes, put_timeout_seconds
        self._peak_bytes, self._compression = 0, compression
        self.incarnation = self._open().incarnation

    def open_lease(self, step: int) -> None:
        self._sweep()
        self._leases.renew(step)

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        freed = 0
        for ref in refs:
            record = self._files.find(self._key(ref))
            if record and record.ref == ref:
                self._files.delete(record)
                freed += ref.num_bytes
        return freed

    def clear(self, step: int) -> int:
        freed = sum(record.ref.num_bytes for record in self.records(step))
        self._leases.close(step)
        self._files.clear(step)
        self._folder.remove_folder(step_folder(step))  # a late writer finds no lease, and removes its own files
        return freed

    def archive(self, step: int) -> None:
        self._leases.close(step)

    def steps(self) -> list[int]:
        return sorted({*self._files.steps(), *self._leases.steps()})

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
        found = ((step, self._leases.find(step)) for step in self._leases.steps())
        leases = {step: lease for step, lease in found if lease and not lease.expired}
        refs = {step: [record.ref for record in self.records(step)] for step in leases}
        held = [ref for step in refs.values() for ref in step]
        num_bytes = sum(ref.num_bytes for ref in held)
        overdue = [step for step, lease in leases.items() if self._leases.is_overdue(lease)]
        return StoreUsage(
            num_chunks=len(held),
            num_rows=sum(ref.num_rows for ref in held),
            num_bytes=num_bytes,
            peak_bytes=max(self._peak_bytes, num_bytes),
            capacity_bytes=self._capacity_bytes,
            leaked_bytes=sum(ref.num_bytes for step in overdue for ref in refs[step]),
            open_leases=tuple(leases),
        )

    def verify(self, batch: BatchHandle) -> None:
        for ref in batch.chunks:
            self._load(ref)

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
        self._require_lease(key)
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
        if self._leases.find(key.step) is None:  # the step was cleared in the meantime
            self.delete([ref])
            raise no_lease_error(key)
        return ref

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        for step in {self._key(read.ref).step for read in reads}:
            if not self._read_only:
                self._leases.renew_if_open(step)
        return [self._fetch_rows(read) for read in reads]

    def _fetch_rows(self, read: ChunkRead) -> pa.RecordBatch:
        blocks = self._open_chunk(read.ref)
        with name_chunk_in_errors(read.ref):
            if not blocks.is_loaded:
                blocks.load_rows(read.names, read.starts, read.stops)
            return decode(blocks.buffer, read.names)

    def _load(self, ref: ChunkRef) -> pa.Buffer:
        """Return all of a chunk's bytes, checked."""
        blocks = self._open_chunk(ref)
        with name_chunk_in_errors(ref):
            blocks.load_all()
        return blocks.buffer

    def _open_chunk(self, ref: ChunkRef) -> ChunkBlocks:
        """Return a chunk's bytes, without loading any of them, unless they are compressed."""
        check_incarnation(ref, self.incarnation)
        key = self._key(ref)
        record = self._files.find(key)
        if record is None:
            raise chunk_not_found_error(ref, lease_expired=self._leases.is_expired(key.step))
        return self._files.open(record, ref)

    def _check_repeated(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        record = self._files.find(key)
        if record is None:
            raise no_lease_error(key)  # it existed a moment ago: the step is being cleared
        return check_same_content(record.ref, decode(self._load(record.ref)), columns)

    def _wait_for_capacity(self, key: ChunkKey, num_bytes: int) -> None:
        deadline = time.monotonic() + self._put_timeout
        while True:
            held = {step: self._files.bytes_by_step(step_folder(step))[step] for step in self._leases.steps()}
            total = sum(held.values())
            if total + num_bytes <= self._capacity_bytes:
                self._peak_bytes = max(self._peak_bytes, total + num_bytes)
                return
            fits_alone = held.get(key.step, 0) + num_bytes <= self._capacity_bytes
            if not fits_alone or time.monotonic() > deadline:
                raise capacity_error(key, num_bytes, total, self._capacity_bytes)
            time.sleep(_POLL_SECONDS)
            self._require_lease(key)  # waiting counts as work on the step, and a sweep may free capacity

    def _require_lease(self, key: ChunkKey) -> None:
        self._sweep()
        self._leases.require(key)

    def _sweep(self) -> None:
        """Free the steps whose leases have expired."""
        for step in self._leases.expire():
            self._files.clear(step)

    def _open(self) -> StoreRecord:
        """Return the folder's own record; the first client writes it."""
        new = StoreRecord(run_id=self.run_id, incarnation=uuid.uuid4().hex)
        found = load_record(self._folder, STORE_PATH, StoreRecord)
        if found is None and self._read_only:
            raise StoreError(f"{self._folder} holds no columns")
        if found is None:
            with suppress(FileExistsError):
                self._folder.create(STORE_PATH, new.model_dump_json().encode())
            found = load_record(self._folder, STORE_PATH, StoreRecord) or new
        if found.run_id != self.run_id:
            raise StoreError(f"{self._folder} holds the columns of run {found.run_id}, expected {self.run_id}")
        return found

    def _key(self, ref: ChunkRef) -> ChunkKey:
        key = ChunkKey.parse(ref.key)
        self._check_run(key)
        return key


class ReplayColumnStore(FsspecColumnStore):
    """A run's files, over another run's. A chunk belongs to the run whose store's incarnation its reference names.

    Args:
        run_id: The replay's own id, of which the chunks are that it puts.
        url: The folder of its own columns.
        source: The columns of the run that it replays, read-only.
    """

    def __init__(self, run_id: str, url: str, source: FsspecColumnStore) -> None:
        super().__init__(run_id, url, lease_seconds=NO_EXPIRY_SECONDS)
        self.source = source

    def verify(self, batch: BatchHandle) -> None:
        for ref in batch.chunks:
            self.read_chunk(ref)

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
