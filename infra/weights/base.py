"""The interfaces of a weight transport: a sender in the policy's rank 0, and a receiver in each rollout worker.

The policy's ranks are called to send version k, and the rollout workers to load it: at the same time for a broadcast,
else afterwards, with what rank 0 returned. Only rank 0 has a sender: the others call `layout.join_gather` with the same
tensors, in case gathering them is a collective.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from infra.engines.base import RolloutEngine
from infra.weights.layout import tensor_views, verify_buffer
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle


class WeightsSender(Protocol):
    """The sending side, in the policy's rank 0."""

    def send(self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> SentWeights:
        """Send a version's tensors.

        Args:
            version: The policy version of the tensors, the live one or any other.
            specs: The specs of the whole tensors, in order; see `layout.tensor_specs`.
            tensors: The whole tensors by name, in the same order, on any device. Each is taken once the previous one is
                written, so that sharded tensors can be gathered one at a time.

        Raises:
            WeightsError: No space is left for them, or they don't match `specs`.
            WorkerLostError: A receiver is gone, or did not join in time.
        """
        ...


class WeightsReceiver(Protocol):
    """The receiving side, in a rollout worker."""

    def load(self, engine: RolloutEngine, version: int, sent: SentWeights | None) -> LoadedWeights:
        """Receive a version, verify it, and only then load it into the engine.

        Args:
            engine: An engine that copies the tensors it is given and doesn't write to them.
            version: The expected version.
            sent: What the sender returned; None for a broadcast, which is received while it is sent.

        Raises:
            WeightsError: The weights are damaged, or of another version or model; the engine is unchanged.
            WorkerLostError: The sender is gone, or did not send in time.
        """
        ...


def load_verified(engine: RolloutEngine, handle: WeightsHandle, buffer: Tensor, started: float) -> LoadedWeights:
    """Load a buffer, uint8 [n], into the engine if it matches its handle.

    Args:
        engine: The engine.
        handle: The buffer's handle.
        buffer: The buffer, on any device.
        started: The time at which receiving began, by `time.perf_counter`.

    Raises:
        WeightsError: The buffer doesn't match its handle, or the weights don't fit the model.
    """
    verify_buffer(handle, buffer)
    verified = time.perf_counter()
    engine.load_weights(tensor_views(buffer, handle.tensors), handle.version)
    return LoadedWeights(
        version=handle.version,
        num_bytes=handle.num_bytes,
        read_seconds=verified - started,
        load_seconds=time.perf_counter() - verified,
    )
