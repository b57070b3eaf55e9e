"""The two ends of a publish, whatever the weights travel by.

The policy's ranks are asked to send version k, and the rollout workers at the same time to load it; the workers are
given Ray's promises of what the policy's first rank returns. Only the first rank has a sender: the others call
`layout.join_gather` with the same tensors, if gathering these is a collective.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from infra.engines.base import RolloutEngine
from infra.weights.layout import tensor_views, verify_buffer
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle

ObjectRefs = Sequence[Any]  # Ray's references to both of what `WeightsSender.send` returned


class WeightsSender(Protocol):
    """The end in the policy's first rank."""

    def send(
        self, version: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], owner: bytes
    ) -> tuple[bytes, SentWeights]:
        """Send a version's tensors; called by an actor's method, which returns what this returns.

        Args:
            version: The policy version that they are, the live one or any other.
            specs: What the whole tensors are like, in order; `layout.tensor_specs` says it of a mapping.
            tensors: By name, in the same order, whole, on any device. Each is taken when the one before is written,
                so that sharded ones can be gathered one at a time.
            owner: The `object_store.address()` of the method's caller.

        Raises:
            WeightsError: There is no room for them, or they are not what `specs` says.
            WorkerLostError: A receiver is gone, or did not come in time.
        """
        ...


class WeightsReceiver(Protocol):
    """The end in a rollout worker."""

    def load(self, engine: RolloutEngine, version: int, refs: ObjectRefs) -> LoadedWeights:
        """Receive a version, verify it, and only then load it into the engine.

        Args:
            engine: It copies the tensors that it is given, which it must not write to.
            version: The version that is to come.
            refs: What the sending method returns.

        Raises:
            WeightsError: Another version came, or a damaged one, or it doesn't fit the model; the engine is as before.
            WorkerLostError: The sender is gone, or did not come in time.
        """
        ...


def load_verified(engine: RolloutEngine, handle: WeightsHandle, buffer: Tensor, started: float) -> LoadedWeights:
    """Load a buffer, uint8 [n], into the engine if it is what its handle says.

    Args:
        engine: The engine.
        handle: The buffer's.
        buffer: On any device.
        started: When receiving it began, by `time.perf_counter`.

    Raises:
        WeightsError: It isn't, or doesn't fit the model.
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
