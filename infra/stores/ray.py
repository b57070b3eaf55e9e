"""A column store in Ray's object store, owned by a registry actor that outlives its producers.

The registry is detached, so it outlives the driver too. It is never restarted: a new registry is a new incarnation of
the store, unless a durable tier names the incarnation.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError

from infra.ray import object_store
from infra.ray.actors import create_actor, find_actor
from infra.ray.object_store import Location
from infra.stores import chunk_writer
from infra.stores.base import ColumnStore
from infra.stores.chunk_errors import object_store_full_error
from infra.stores.chunk_reads import ChunkRead, decode_chunk
from infra.stores.duplicates import check_same_content
from infra.stores.ray_registry import RayStoreRegistry
from infra.stores.rpc import Endpoint, RpcClient
from rl_core.columns.codec import decode, encode, encoded_bytes
from schemas.batch import BatchHandle, ChunkKey, ChunkRef
from schemas.errors import WorkerLostError
from schemas.store import StoreUsage

_CLOSE_SECONDS = 10.0
_INLINE_BYTES = 64 * 1024  # smaller chunks are sent to the registry instead of being written by their producer

logger = logging.getLogger(__name__)


class RayColumnStore(ColumnStore):
    """One run's columns. Every process that is connected to the Ray cluster makes its own client.

    A client whose registry has died raises WorkerLostError from then on; a new client finds or starts a new registry.

    An actor that puts large chunks should be a `chunk_writer.ChunkWriter`: it writes them once, on its own node.
    Another process sends them to the registry, which takes several copies.
    """

    def __init__(
        self,
        run_id: str,
        capacity_bytes: int | None = None,
        *,
        put_timeout_seconds: float = 60.0,
        lease_seconds: float = 3600.0,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Find the run's registry, or start it. An existing registry keeps its own settings.

        Args:
            run_id: The run whose columns these are.
            capacity_bytes: The limit on the bytes of all held chunks together. None: never start a registry.
            put_timeout_seconds: How long a put waits for other steps to be cleared.
            lease_seconds: How long a lease lasts unless it is renewed.
            incarnation: The name of the incarnation that is started; None makes a new one.
            clock: Returns the time in seconds, by which leases expire; called in the registry's process.

        Raises:
            WorkerLostError: There is no living registry, and no capacity was passed.
        """
        super().__init__(run_id)
        if not ray.is_initialized():  # otherwise Ray itself would search for a cluster, for minutes
            raise WorkerLostError(
                f"the column store of run {run_id} can't be reached: this process isn't connected to Ray"
            )
        if capacity_bytes is None:
            self._actor = _find_registry(run_id)
        else:
            settings = capacity_bytes, put_timeout_seconds, lease_seconds, incarnation, clock
            self._actor = create_actor(registry_name(run_id), RayStoreRegistry, run_id, *settings)
        try:
            endpoint, self._registry, self.incarnation = self._actor.endpoint.remote().future().result()
            self._client = RpcClient(Endpoint(*endpoint))
        except (RayActorError, OSError) as error:
            raise self._lost(error) from error
        self._writer: str | None = None
        self._unconfirmed: list[str] = []

    def close(self) -> None:
        """Kill the run's registry, which frees everything it holds, and wait until it can't be found or reached."""
        ray.kill(self._actor, no_restart=True)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < deadline:
            if not _succeeds(lambda: _find_registry(self.run_id)) and not _succeeds(self.steps):
                return
            time.sleep(0.01)
        logger.warning("the column store of run %s still exists %g s after it was killed", self.run_id, _CLOSE_SECONDS)

    def flush(self) -> None:
        """See `ColumnStore.flush`: before it, a chunk that this process wrote is lost if the process dies just then."""
        if self._unconfirmed:
            self._call("confirm", self._unconfirmed)
            self._unconfirmed = []

    def verify(self, batch: BatchHandle) -> None:
        self._locations(batch.chunks)

    def open_lease(self, step: int) -> None:
        self._call("open_lease", step)

    def delete(self, refs: Sequence[ChunkRef]) -> int:
        return int(self._call("delete", [ref.model_dump() for ref in refs]))

    def clear(self, step: int) -> int:
        return int(self._call("clear", step))

    def steps(self) -> list[int]:
        return list(self._call("steps"))

    def save_batch(self, batch: BatchHandle) -> None:
        self._call("save_batch", batch.step, batch.model_dump_json())

    def load_batch(self, step: int) -> BatchHandle | None:
        saved = self._call("load_batch", step)
        return None if saved is None else BatchHandle.model_validate_json(saved)

    def usage(self) -> StoreUsage:
        return StoreUsage.model_validate(self._call("usage"))

    def _put(self, key: ChunkKey, columns: pa.RecordBatch) -> ChunkRef:
        num_bytes = encoded_bytes(columns)
        if held := self._call("begin_put", str(key), num_bytes):
            stored = decode(object_store.view_at(held["location"]))
            return check_same_content(ChunkRef(**held["ref"]), stored, columns)
        writer = self._this_writer() if num_bytes > _INLINE_BYTES else None
        write = chunk_writer.ChunkWrite(columns, num_bytes)
        try:
            if writer:
                write.submit(self._registry)
            data = None if writer else encode(columns).to_pybytes()
            task = (writer, write.task_id) if writer else None
            ref = ChunkRef(**self._call("end_put", str(key), columns.num_rows, num_bytes, task, data=data))
        except BaseException as error:
            write.cancel()
            self._call("abort_put", str(key), (writer, write.task_id))
            if isinstance(error, ObjectStoreFullError | OutOfDiskError):
                raise object_store_full_error(key) from error
            raise
        self._unconfirmed += [str(key)] if writer else []
        return ref

    def _fetch(self, reads: list[ChunkRead]) -> list[pa.RecordBatch]:
        locations = self._locations([read.ref for read in reads])
        return [decode_chunk(read, object_store.view_at(at)) for read, at in zip(reads, locations, strict=True)]

    def _locations(self, refs: Sequence[ChunkRef]) -> list[Location]:
        return [tuple(location) for location in self._call("locations", [ref.model_dump() for ref in refs])]

    def _this_writer(self) -> str | None:
        """Return the actor id under which this process is registered as a writer; None if it can't be one."""
        if self._writer is None and (writer := chunk_writer.this_writer()):
            actor_id = ray.get_runtime_context().get_actor_id()
            self._actor.add_writer.remote(actor_id, writer).future().result()
            self._writer = actor_id
        return self._writer

    def _call(self, method: str, *args: object, data: bytes | None = None) -> Any:
        try:
            return self._client.call(method, *args, data=data)
        except ConnectionError as error:
            if self._writer:
                chunk_writer.stop_serving(self._registry)
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> WorkerLostError:
        return WorkerLostError(f"the column store of run {self.run_id} is gone, with the columns that it held: {error}")


def _succeeds(request: Callable[[], object]) -> bool:
    try:
        request()
    except WorkerLostError:
        return False
    return True


def registry_name(run_id: str) -> str:
    """Return the name under which every process of the cluster finds a run's registry."""
    return f"sluice/{run_id}/store"


def _find_registry(run_id: str) -> Any:
    if (actor := find_actor(registry_name(run_id))) is None:
        raise WorkerLostError(f"run {run_id} has no column store in this Ray cluster")
    return actor
