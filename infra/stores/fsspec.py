"""A column store of Arrow IPC files under any fsspec URL, for all processes that reach it.

    store.json                            the run, and the name of this incarnation of the store
    step-000007/_lease.json               until when puts are allowed; gone once the step is archived
    step-000007/_batch.json               the step's newest handle
    step-000007/rollout-0-0.json          a chunk's record: it is committed when this is there
    step-000007/rollout-0-0.<sum>.arrow   its bytes

A chunk's bytes are written first, under a name of their own; then the record, exclusively: of two writers one wins,
and a writer that dies leaves nothing readable. Paths are made from validated keys, never read from a file.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa
from pydantic import ValidationError

from infra.storage.blocks import Blocks, block_sums, whole_sum
from infra.storage.folder import Folder
from infra.stores.base import ChunkRead, ColumnStore, decode_chunk, reading
from infra.stores.chunk_index import capacity_error, check_incarnation, chunk_not_found, expired_error, lease_error
from infra.stores.fence import same_content
from rl_core.columns.codec import decode, encode
from schemas.base import Frozen
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.errors import ChunkCorruptedError, StoreError
from schemas.store import StoreUsage

_POLL_SECONDS = 0.2
NO_LIMIT = 2**63 - 1
NO_EXPIRY_SECONDS = 1e10

Record = TypeVar("Record", bound=Frozen)


class ChunkRecord(Frozen):
    """What is known of a committed chunk."""

    ref: ChunkRef
    checksum: str  # of all its bytes
    block_checksums: tuple[str, ...]  # of each block, so that a read checks what it reads


class StoreRecord(Frozen):
    """Whose columns a folder holds."""

    run_id: str
    incarnation: str


class Lease(Frozen):
    """Until when a step accepts puts, in seconds since 1970; an expired one's chunks have been freed."""

    until: float
    expired: bool = False


class FsspecColumnStore(ColumnStore):
    """One run's columns as files. Every process makes its own client; the files are all that they share.

    Args:
        run_id: The run whose columns these are.
        url: The folder of this run's columns, any fsspec URL or a local path.
        capacity_bytes: The limit of all leased steps together. Puts at the same moment may pass it together.
        put_timeout_seconds: How long a put waits for other steps' bytes to be cleared.
        lease_seconds: How long a lease lasts that nobody renews.
        storage_options: What fsspec passes to the file system.
        read_only: Whether to leave all files as they are; then the folder must be a store already.

    Raises:
        StoreError: The folder holds another run's columns, or none.
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
        read_only: bool = False,
    ) -> None:
        super().__init__(run_id)
        self._read_only = read_only
        self._folder = Folder(url, storage_options or {})
        self._capacity_bytes, self._put_timeout = capacity_bytes, put_timeout_seconds
        self._lease_seconds = lease_seconds
        self._peak_bytes = 0
        self.incarnation = self._open().incarnation

    def open_lease(self, step: int) -> None:
        self._sweep()
        self._renew(step)

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        freed = 0
        for ref in refs:
            key = self._key(ref)
            record = self._record(key)
            if record and record.ref == ref:
                self._folder.remove(_record_path(key))
                self._folder.remove(_data_path(key, record.checksum))
                freed += ref.num_bytes
        return freed

    def clear(self, step: int) -> int:
        freed = sum(record.ref.num_bytes for record in self.records(step))
        self._remove(step)
        self._folder.remove_folder(_folder(step))  # a late writer sees that the lease is gone, and removes its own
        return freed

    def archive(self, step: int) -> None:
        self._folder.remove(_lease_path(step))

    def steps(self) -> list[int]:
        return _steps(self._folder.sizes())

    def save_batch(self, batch: BatchHandle) -> None:
        self._folder.write(_batch_path(batch.step), batch.model_dump_json().encode())

    def load_batch(self, step: int) -> BatchHandle | None:
        return self._load(_batch_path(step), BatchHandle)

    def records(self, step: int) -> list[ChunkRecord]:
        """The step's committed chunks, by key."""
        names = sorted(name for name in self._folder.sizes(_folder(step)) if _is_record(name, step))
        return [record for name in names if (record := self._load(name, ChunkRecord))]

    def usage(self) -> StoreUsage:
        """See `ColumnStore.usage`. The peak is the highest that this client saw, when it put."""
        now = time.time()
        leases = {step: lease for step in self.steps() if (lease := self._lease(step)) and not lease.expired}
        refs = {step: [record.ref for record in self.records(step)] for step in leases}
        held = [ref for step in refs.values() for ref in step]
        num_bytes = sum(ref.num_bytes for ref in held)
        return StoreUsage(
            num_chunks=len(held),
            num_rows=sum(ref.num_rows for ref in held),
            num_bytes=num_bytes,
            peak_bytes=max(self._peak_bytes, num_bytes),
            capacity_bytes=self._capacity_bytes,
            leaked_bytes=sum(ref.num_bytes for step in refs if leases[step].until < now for ref in refs[step]),
            open_leases=tuple(leases),
        )

    def verify(self, batch: BatchHandle) -> None:
        for ref in batch.chunks:
            self._data(ref)

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        self._require_lease(key)
        data = encode(columns)
        ref = ChunkRef(key=str(key), num_rows=columns.num_rows, num_bytes=data.size, incarnation=self.incarnation)
        sums = block_sums(data)
        record = ChunkRecord(ref=ref, checksum=whole_sum(sums), block_checksums=sums)
        if self._record(key):
            return self._compare(key, columns)
        self._wait_for_room(key, data.size)
        self._folder.write(_data_path(key, record.checksum), data)
        try:
            self._folder.create(_record_path(key), record.model_dump_json().encode())
        except FileExistsError:
            return self._compare(key, columns)
        if self._lease(key.step) is None:  # cleared in between
            self.delete([ref])
            raise lease_error(key)
        return ref

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        for step in {self._key(read.ref).step for read in reads}:
            lease = self._lease(step)
            if lease and not lease.expired and not self._read_only:
                self._renew_if_due(step, lease)
        return [self._fetch_rows(read) for read in reads]

    def _fetch_rows(self, read: ChunkRead) -> pa.RecordBatch:
        blocks = self._blocks(read.ref)
        with reading(read.ref):
            blocks.require_rows(read.names, read.starts, read.stops)
        return decode_chunk(read, blocks.buffer)

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch:
        """All rows and columns of one chunk.

        Raises:
            ChunkNotFoundError: It is not there.
            ChunkCorruptedError: It is damaged.
        """
        data = self._data(ref)
        with reading(ref):
            return decode(data)

    def _data(self, ref: ChunkRef) -> pa.Buffer:
        """A chunk's bytes, checked."""
        blocks = self._blocks(ref)
        with reading(ref):
            blocks.require([(0, ref.num_bytes)])
        return blocks.buffer

    def _blocks(self, ref: ChunkRef) -> Blocks:
        """A chunk's bytes, none of them read yet."""
        check_incarnation(ref, self.incarnation)
        key = self._key(ref)
        record = self._record(key)
        if record is None:
            lease = self._lease(key.step)
            raise chunk_not_found(ref, "the lease of its step expired" if lease and lease.expired else "")
        with reading(ref):
            if record.ref != ref:
                raise StoreError(f"its record says {record.ref}, expected {ref}")
            if whole_sum(record.block_checksums) != record.checksum:
                raise StoreError("the checksums in its record disagree")
            path = _data_path(key, record.checksum)
            if (size := self._folder.size(path)) != ref.num_bytes:
                raise StoreError(f"{size or 0} bytes are stored, expected {ref.num_bytes}")
            fetch = partial(self._folder.read_ranges, path)
            return Blocks(ref.num_bytes, record.block_checksums, self._folder.map(path), fetch)

    def _compare(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        record = self._record(key)
        if record is None:
            raise lease_error(key)  # it was there a moment ago: the step is being cleared
        return same_content(record.ref, decode(self._data(record.ref)), columns)

    def _wait_for_room(self, key: ChunkKey, num_bytes: int) -> None:
        deadline = time.monotonic() + self._put_timeout
        while True:
            held = self._bytes_by_step()
            total = sum(held.values())
            if total + num_bytes <= self._capacity_bytes:
                self._peak_bytes = max(self._peak_bytes, total + num_bytes)
                return
            may_get_room = held.get(key.step, 0) + num_bytes <= self._capacity_bytes
            if not may_get_room or time.monotonic() > deadline:
                raise capacity_error(key, num_bytes, total, self._capacity_bytes)
            time.sleep(_POLL_SECONDS)
            self._require_lease(key)  # who waits still works on its step; and a sweep may make room

    def _bytes_by_step(self) -> dict[int, int]:
        """The bytes of each leased step's chunks."""
        sizes = self._folder.sizes()
        held = {step: 0 for step in _steps(sizes) if _lease_path(step) in sizes}
        for name, size in sizes.items():
            if name.endswith(".arrow") and (step := _steps([name])[0]) in held:
                held[step] += size
        return held

    def _require_lease(self, key: ChunkKey) -> None:
        self._sweep()
        lease = self._lease(key.step)
        if lease is None:
            raise lease_error(key)
        if lease.expired:
            raise expired_error(key, self._lease_seconds)
        self._renew_if_due(key.step, lease)

    def _renew_if_due(self, step: int, lease: Lease) -> None:
        if lease.until - time.time() < self._lease_seconds / 2:
            self._renew(step)

    def _renew(self, step: int) -> None:
        lease = Lease(until=time.time() + self._lease_seconds)
        self._folder.write(_lease_path(step), lease.model_dump_json().encode())

    def _lease(self, step: int) -> Lease | None:
        return self._load(_lease_path(step), Lease)

    def _sweep(self) -> None:
        """Free the steps whose leases have expired. Archived ones have none."""
        now = time.time()
        for step in self.steps():
            lease = self._lease(step)
            if lease and not lease.expired and lease.until < now:
                self._folder.write(_lease_path(step), lease.replace(expired=True).model_dump_json().encode())
                self._remove(step, but=_lease_path(step))

    def _remove(self, step: int, but: str = "") -> None:
        """Remove a step's files, in an order in which nothing is ever half there: lease, records, bytes."""
        names = [name for name in self._folder.sizes(_folder(step)) if name != but]
        for name in sorted(names, key=lambda name: (name.endswith(".arrow"), name != _lease_path(step))):
            self._folder.remove(name)

    def _open(self) -> StoreRecord:
        """The folder's own record; made by whoever comes first."""
        made = StoreRecord(run_id=self.run_id, incarnation=uuid.uuid4().hex)
        found = self._load("store.json", StoreRecord)
        if found is None and self._read_only:
            raise StoreError(f"{self._folder} holds no columns")
        if found is None:
            with suppress(FileExistsError):
                self._folder.create("store.json", made.model_dump_json().encode())
            found = self._load("store.json", StoreRecord) or made
        if found.run_id != self.run_id:
            raise StoreError(f"{self._folder} holds the columns of run {found.run_id}, expected {self.run_id}")
        return found

    def _record(self, key: ChunkKey) -> ChunkRecord | None:
        return self._load(_record_path(key), ChunkRecord)

    def _load(self, name: str, kind: type[Record]) -> Record | None:
        data = self._folder.read(name)
        try:
            return None if data is None else kind.model_validate_json(data)
        except ValidationError as error:
            raise ChunkCorruptedError(
                f"{name} in {self._folder} is no {kind.__name__}: {error.errors()[0]['msg']}; "
                "clear its step and run it again"
            ) from None

    def _key(self, ref: ChunkRef) -> ChunkKey:
        key = ChunkKey.parse(ref.key)
        self._check_run(key)
        return key


def _folder(step: int) -> str:
    return f"step-{step:06d}"


def _lease_path(step: int) -> str:
    return f"{_folder(step)}/_lease.json"


def _batch_path(step: int) -> str:
    return f"{_folder(step)}/_batch.json"


def _record_path(key: ChunkKey) -> str:
    return f"{_folder(key.step)}/{key.stage}-{key.shard}-{key.attempt}.json"


def _data_path(key: ChunkKey, checksum: str) -> str:
    return f"{_folder(key.step)}/{key.stage}-{key.shard}-{key.attempt}.{checksum}.arrow"


def _is_record(name: str, step: int) -> bool:
    path = PurePosixPath(name)
    return str(path.parent) == _folder(step) and path.suffix == ".json" and not path.name.startswith("_")


def _steps(names: Iterable[str]) -> list[int]:
    folders = {PurePosixPath(name).parts[0] for name in names}
    return sorted(int(folder.removeprefix("step-")) for folder in folders if folder.startswith("step-"))
