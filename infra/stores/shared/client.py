"""A column store in shared memory: chunks are Arrow files that every process of a node maps; other nodes fetch rows.

A chunk lies in the memory of the node that put it. Requests go to the run's index, `StoreIndex`, over Arrow Flight.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from infra.stores.base import ColumnStore, check_same_content, lost_store_error
from infra.stores.chunk_reads import ChunkRead, decode_chunk
from infra.stores.shared.flight import Endpoint, FlightClient
from infra.stores.shared.node_files import RemoteColumns, map_chunk, write_chunk
from schemas.batch import BatchHandle, ChunkKey, ChunkRef, StoreUsage
from schemas.errors import ChunkNotFoundError, StoreError

_CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class File(NamedTuple):
    """A chunk's file: the location of the column server that owns it, and its name there."""

    location: str
    name: str


class Membership(NamedTuple):
    """What a client needs."""

    endpoint: Endpoint  # where its requests go
    incarnation: str  # the store's incarnation
    location: str  # the column server of its node
    folder: str  # that server's files
    put_timeout_seconds: float  # how long a put waits for memory


class SharedColumnStore(ColumnStore):
    """One run's columns. A client whose index has died raises WorkerLostError from then on.

    Args:
        run_id: The run whose columns these are.
        join: Returns this process's membership; called again if its node's column server was lost.
        stop: Kills the index, after its files are removed.
    """

    def __init__(self, run_id: str, join: Callable[[], Membership], stop: Callable[[], None] = lambda: None) -> None:
        super().__init__(run_id)
        self._join, self._stop = join, stop
        self._member = join()
        self.incarnation = self._member.incarnation
        self._client = FlightClient(self._member.endpoint)
        self._remote = RemoteColumns(self._member.endpoint)

    @property
    def endpoint(self) -> Endpoint:
        """Where any Arrow Flight client can read the newest columns of a step, with the token."""
        return self._member.endpoint

    def close(self) -> None:
        """Remove all columns, end the index, and wait until it can't be reached any more."""
        self._call("remove")
        self._client.close()
        self._stop()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < deadline:
            try:
                self._client.call("steps")
            except ConnectionError:
                return
            time.sleep(0.01)
        logger.warning("the column store of run %s still exists %g s after it was killed", self.run_id, _CLOSE_SECONDS)

    def verify(self, batch: BatchHandle) -> None:
        self._files(batch.chunks)

    def open(self, step: int) -> None:
        self._call("open", step)

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        return int(self._call("delete", [ref.model_dump() for ref in refs]))

    def clear(self, step: int) -> int:
        return int(self._call("clear", step))

    def steps(self) -> list[int]:
        return list(self._call("steps"))

    def chunks(self, step: int) -> list[ChunkRef]:
        return [ChunkRef(**ref) for ref in self._call("chunks", step)]

    def save_batch(self, batch: BatchHandle) -> None:
        self._call("save_batch", batch.step, batch.model_dump_json())

    def load_batch(self, step: int) -> BatchHandle | None:
        saved = self._call("load_batch", step)
        return None if saved is None else BatchHandle.model_validate_json(saved)

    def usage(self) -> StoreUsage:
        return StoreUsage.model_validate(self._call("usage"))

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        while not (answer := self._add(key, columns)):
            self._member = self._join()  # the column server was lost, and another one is started
        ref = ChunkRef(**answer["ref"])
        if "held" in answer:
            return check_same_content(ref, self._read(ref, File(*answer["held"]), None), columns)
        return ref

    def _add(self, key: ChunkKey, columns: pa.RecordBatch) -> dict[str, Any]:
        """Write a chunk's file, and return the answer of `StoreIndex.put`; nothing if the column server was lost."""
        location, folder, timeout = self._member.location, Path(self._member.folder), self._member.put_timeout_seconds
        try:
            name, num_bytes = write_chunk(key, folder, columns, timeout)
        except FileNotFoundError:
            if self._call("forget_server", location):
                return {}
            raise StoreError(f"can't put {key}: {folder} was removed while the run was active") from None
        return dict(self._call("put", str(key), columns.num_rows, num_bytes, File(location, name)))

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        files = self._files([read.ref for read in reads])
        return [self._read(read.ref, file, read) for read, file in zip(reads, files, strict=True)]

    def _read(self, ref: ChunkRef, file: File, read: ChunkRead | None) -> pa.RecordBatch:
        """Return the parts of a chunk, or all of it: mapped on this node, else fetched."""
        if file.location == self._member.location:
            data = map_chunk(Path(self._member.folder) / file.name, ref)
            return decode_chunk(ref, data, read.names if read else None)
        try:
            return self._remote.read(file.location, file.name, ref, read)
        except ConnectionError as error:
            self._call("forget_server", file.location)
            raise ChunkNotFoundError(
                f"chunk {ref.key} is lost with its node's column server at {file.location}: {error}"
            ) from None

    def _files(self, refs: Sequence[ChunkRef]) -> list[File]:
        return [File(*file) for file in self._call("files", [ref.model_dump() for ref in refs])]

    def _call(self, method: str, *args: object) -> Any:
        try:
            return self._client.call(method, *args)
        except ConnectionError as error:
            raise lost_store_error(self.run_id, error) from None
