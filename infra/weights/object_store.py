"""The object-store transport: weights are written to Ray's object store, copied once per node, and mapped there.

The buffer is a return value of the sending task, so its caller owns it. Ray frees it when the caller drops its ref,
after the receivers have loaded.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError
from torch import Tensor

from infra.engines.base import RolloutEngine
from infra.ray import object_store
from infra.weights.base import ObjectRefs, load_verified
from infra.weights.checksum import checksum
from infra.weights.layout import buffer_as_tensor, check_version, flat_bytes, join_gather, make_handle, write_tensors
from schemas.errors import ChunkNotFoundError, PipelineError, WeightsError, WorkerLostError
from schemas.weights import LoadedWeights, SentWeights, TensorSpec


class ObjectStoreSender:
    """A `WeightsSender` through the object store; the sending method has two return values (`num_returns=2`).

    Args:
        run_id: The run whose weights it sends.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def send(
        self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], owner: bytes
    ) -> tuple[bytes, SentWeights]:
        """Write a version's tensors to the object store; see `WeightsSender.send`."""
        started, remaining = time.perf_counter(), iter(tensors)

        def fill(memory: memoryview) -> SentWeights:
            buffer = buffer_as_tensor(memory)
            write_tensors(buffer, specs, remaining)
            handle = make_handle(self._run_id, version, specs, checksum(buffer))
            return SentWeights(handle=handle, seconds=time.perf_counter() - started)

        try:
            return object_store.return_written(flat_bytes(specs), fill, owner)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            join_gather(remaining)  # the other ranks gather all tensors
            raise WeightsError(
                f"Ray's object store has no space for the {flat_bytes(specs)} bytes of version {version}'s weights; "
                f"give Ray more memory, or lower store.capacity_bytes: {error}"
            ) from error


class ObjectStoreReceiver:
    """A `WeightsReceiver` through the object store.

    Args:
        run_id: The run whose weights it accepts.
        timeout_seconds: The longest wait for the sender, and then for the buffer.
    """

    def __init__(self, run_id: str, timeout_seconds: float) -> None:
        self._run_id, self._timeout = run_id, timeout_seconds

    def load(self, engine: RolloutEngine, version: int, refs: ObjectRefs) -> LoadedWeights:
        """Receive and load a version; see `WeightsReceiver.load`."""
        data, sent = refs
        handle, started = self._await_sent(sent, version).handle, time.perf_counter()
        check_version(handle, self._run_id, version)
        try:
            mapped = object_store.view(data, self._timeout)
        except ChunkNotFoundError as error:
            raise WeightsError(f"the weights of version {version} are gone; publish them again: {error}") from None
        return load_verified(engine, handle, buffer_as_tensor(mapped), started)

    def _await_sent(self, sent: Any, version: int) -> SentWeights:
        """Wait for the sender's report."""
        try:
            return SentWeights.model_validate(ray.get(sent, timeout=self._timeout))
        except GetTimeoutError:
            raise WorkerLostError(
                f"the policy did not send the weights of version {version} within {self._timeout:g} s"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, PipelineError):
                raise error.cause from None
            raise
        except RayError as error:
            raise WorkerLostError(f"the policy could not send the weights of version {version}: {error}") from None
