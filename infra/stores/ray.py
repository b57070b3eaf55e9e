"""A column store in Ray's object store, owned by a registry actor that outlives its producers.

The registry is detached, so it outlives the driver too. It is never restarted: a new one is a new generation.
"""

import logging
import time
from typing import Any, Self

import pyarrow as pa
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayTaskError

from infra.stores import plasma
from infra.stores.base import ColumnStore
from infra.stores.registry import ChunkRegistry
from rl_core.columns.codec import decode
from schemas.batch import ChunkKey, ChunkRef
from schemas.errors import CapacityError, PipelineError, WorkerLostError
from schemas.step import StoreUsage

NAMESPACE = "sluice"
_GONE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class PlasmaRegistry(ChunkRegistry[ray.ObjectRef[bytes]]):
    """The registry actor's class: it puts every chunk itself, and so owns it."""

    def _hold(self, data: bytes) -> ray.ObjectRef[bytes]:
        try:
            return ray.put(data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise CapacityError(
                f"Ray's object store has no room for {len(data)} bytes on top of {self._num_bytes} held: "
                "lower store.capacity_bytes, or give Ray more memory"
            ) from error

    def _view(self, payload: ray.ObjectRef[bytes]) -> pa.Buffer:
        return plasma.view(payload)


class RayColumnStore(ColumnStore):
    """One run's columns. Every process that has joined the Ray cluster makes its own client.

    Calls block without `ray.get`, which would swallow the cancellation of a Prefect task. A client whose
    registry has died raises WorkerLostError from then on; a new client finds or makes a new registry.
    """

    def __init__(self, run_id: str, capacity_bytes: int | None = None) -> None:
        """Find the run's registry, or start it.

        Args:
            run_id: The run whose columns these are.
            capacity_bytes: The limit of a registry that has to be started; one that is there keeps its own.
                None: never start one.

        Raises:
            WorkerLostError: There is no living registry, and None was passed.
        """
        if not ray.is_initialized():  # else Ray would look for some cluster by itself, for minutes
            raise WorkerLostError(f"the column store of run {run_id} can't be reached: this process has joined no Ray")
        self._run_id = run_id
        self._registry = _find_registry(run_id) if capacity_bytes is None else _start_registry(run_id, capacity_bytes)
        self.generation: str = self._call("generation")

    @classmethod
    def attach(cls, run_id: str) -> Self | None:
        """A client of the run's registry if that is alive, else None."""
        try:
            return cls(run_id)
        except WorkerLostError:
            return None

    def destroy(self) -> None:
        """Kill the run's registry, which frees all it holds, and wait until its name is free."""
        ray.kill(self._registry, no_restart=True)
        deadline = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < deadline:
            try:
                _find_registry(self._run_id)
            except WorkerLostError:
                return
            time.sleep(0.01)
        logger.warning("the column store of run %s is still named %g s after its end", self._run_id, _GONE_SECONDS)

    def open_lease(self, run_id: str, step: int) -> None:
        self._call("open_lease", run_id, step)

    def clear(self, run_id: str, step: int) -> int:
        return int(self._call("clear", run_id, step))

    def usage(self) -> StoreUsage:
        return StoreUsage.model_validate(self._call("usage"))

    def _put(self, key: ChunkKey, num_rows: int, data: pa.Buffer) -> ChunkRef:
        return ChunkRef.model_validate(self._call("put", key, num_rows, data.to_pybytes()))

    def _fetch(self, refs: list[ChunkRef]) -> list[pa.RecordBatch]:
        return [decode(plasma.view(ref)) for ref in self._call("payloads", refs)]

    def _call(self, method: str, *args: object) -> Any:
        try:
            return getattr(self._registry, method).remote(*args).future().result()
        except RayTaskError as error:
            if isinstance(error.cause, PipelineError):
                raise error.cause from None  # as the registry raised it, without Ray's wrapping
            raise
        except RayActorError as error:
            raise WorkerLostError(
                f"the column store of run {self._run_id} is gone, and the columns it held with it: {error}"
            ) from error


def _registry_name(run_id: str) -> str:
    return f"sluice/{run_id}/store"


def _find_registry(run_id: str) -> Any:
    try:
        return ray.get_actor(_registry_name(run_id), namespace=NAMESPACE)
    except ValueError as error:
        raise WorkerLostError(f"run {run_id} has no column store in this Ray cluster") from error


def _start_registry(run_id: str, capacity_bytes: int) -> Any:
    actor = ray.remote(PlasmaRegistry).options(
        name=_registry_name(run_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
    )
    return actor.remote(capacity_bytes)
