"""The transfer of weights from the policy to the rollout workers: their layout and measurements."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.config.model import LoraConfig

Transport = Literal["shared_memory", "broadcast"]


class Adapter(Frozen):
    """The base model that an adapter-only checkpoint's weights are added to, and the adapter's settings."""

    base_model: str  # a Hugging Face folder, or a hub name
    lora: LoraConfig


class TensorSpec(Frozen):
    """One tensor of a flat buffer; its offset follows from the tensors before it."""

    name: str
    dtype: str  # torch's name, such as "bfloat16"
    shape: tuple[NonNegativeInt, ...]


class WeightsHandle(Frozen):
    """The weights of one policy version in one flat buffer; see `infra.weights.layout`."""

    run_id: SafeName
    version: NonNegativeInt
    tensors: tuple[TensorSpec, ...]
    num_bytes: PositiveInt  # of the whole buffer, padding included
    checksum: str  # see `infra.weights.checksum`


class WeightsFile(Frozen):
    """A buffer in a node's shared memory."""

    node: str  # Ray's id
    path: str
    actor: str  # the policy's rank 0, from which receivers on other nodes fetch it


class SentWeights(Frozen):
    """The policy's side of a transfer."""

    handle: WeightsHandle
    file: WeightsFile | None = None  # None: it was broadcast
    seconds: NonNegativeFloat  # to gather the tensors, lay them out and compute the checksum


class LoadedWeights(Frozen):
    """One rollout worker's side of a transfer."""

    version: NonNegativeInt
    num_bytes: PositiveInt
    read_seconds: NonNegativeFloat  # until the buffer is received and verified; a broadcast is timed from its start
    load_seconds: NonNegativeFloat  # for the engine to copy the weights into its model


class WeightGroupMember(Frozen):
    """A worker that sends or receives weights."""

    gpu: str  # a unique name of the GPU; empty on a CPU
    group_id: str  # the process group for broadcasts; empty: none


class WeightsTransfer(Frozen):
    """The measurements of one publish."""

    transport: Transport
    num_bytes: PositiveInt  # of one copy of the buffer
    num_receivers: NonNegativeInt
    write_seconds: NonNegativeFloat
    read_seconds: NonNegativeFloat  # of the slowest receiver
    load_seconds: NonNegativeFloat  # of the slowest receiver

    @classmethod
    def of(cls, transport: Transport, sent: SentWeights, loaded: Sequence[LoadedWeights]) -> Self:
        """Combine the measurements of the sender and of all receivers."""
        return cls(
            transport=transport,
            num_bytes=sent.handle.num_bytes,
            num_receivers=len(loaded),
            write_seconds=sent.seconds,
            read_seconds=max((each.read_seconds for each in loaded), default=0.0),
            load_seconds=max((each.load_seconds for each in loaded), default=0.0),
        )
