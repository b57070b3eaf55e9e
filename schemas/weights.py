"""Weights on their way from the policy to the rollout workers: what was sent, and how long it took."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.batch import SafeName

Transport = Literal["object_store", "broadcast"]


class TensorSpec(Frozen):
    """One tensor of a flat buffer; where it lies follows from those before it."""

    name: str
    dtype: str  # torch's name, such as "bfloat16"
    shape: tuple[NonNegativeInt, ...]


class WeightsHandle(Frozen):
    """The weights of one policy version as one flat buffer; see `infra.weights.layout`."""

    run_id: SafeName
    version: NonNegativeInt
    tensors: tuple[TensorSpec, ...]
    num_bytes: PositiveInt  # of the whole buffer, padding included
    checksum: str  # see `infra.weights.checksum`


class SentWeights(Frozen):
    """What the policy sent."""

    handle: WeightsHandle
    seconds: NonNegativeFloat  # gathering the tensors, laying them out and their checksum


class LoadedWeights(Frozen):
    """What one rollout worker received and loaded."""

    version: NonNegativeInt
    num_bytes: PositiveInt
    read_seconds: NonNegativeFloat  # until the buffer was there and verified; a broadcast's, from its beginning
    load_seconds: NonNegativeFloat  # the engine's own copy


class WeightGroupMember(Frozen):
    """A worker that sends or receives weights."""

    gpu: str  # a name that no other GPU has; empty on the CPU
    group_id: str  # of the group in which it broadcasts; empty without


class WeightsTransfer(Frozen):
    """One publish, as measured."""

    transport: Transport
    num_bytes: PositiveInt  # of the buffer, once
    num_receivers: NonNegativeInt
    write_seconds: NonNegativeFloat
    read_seconds: NonNegativeFloat  # of the slowest receiver
    load_seconds: NonNegativeFloat  # likewise

    @classmethod
    def of(cls, transport: Transport, sent: SentWeights, loaded: Sequence[LoadedWeights]) -> Self:
        """What one send and its receivers' loads make together."""
        return cls(
            transport=transport,
            num_bytes=sent.handle.num_bytes,
            num_receivers=len(loaded),
            write_seconds=sent.seconds,
            read_seconds=max((each.read_seconds for each in loaded), default=0.0),
            load_seconds=max((each.load_seconds for each in loaded), default=0.0),
        )
