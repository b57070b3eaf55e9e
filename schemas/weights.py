"""The transfer of weights from the policy to the rollout workers: their layout and measurements."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import Frozen
from schemas.batch import SafeName
from schemas.config.model import LoraConfig
from schemas.config.renamed import VALUES

Transport = Literal["shared_memory", "broadcast"]
_RENAMED = VALUES["weights.transport"]


class Adapter(Frozen):
    """The base model that an adapter-only checkpoint's weights are added to, and the adapter's settings."""

    base_model: str  # a Hugging Face folder, or a hub name
    base_digest: str = ""  # see `infra.models.files.weights_digest`; earlier versions of Sluice didn't record it
    lora: LoraConfig


class TensorSpec(Frozen):
    """One tensor of a flat buffer; its offset follows from the tensors before it."""

    name: str
    dtype: str  # torch's name, such as "bfloat16"
    shape: tuple[NonNegativeInt, ...]


class ProbeRow(Frozen):
    """A row of known tokens, and the trainer's log-probs of them; see `infra.weights.probe`."""

    token_ids: tuple[NonNegativeInt, ...]  # [T], T >= 2
    logprobs: tuple[float, ...]  # [T - 1], of all tokens but the first: nats, of the logits divided by the temperature
    temperature: PositiveFloat
    compute_dtype: str  # the trainer's


class WeightsHandle(Frozen):
    """The weights of one policy version, sent in buckets; see `infra.weights.buckets`."""

    run_id: SafeName
    version: NonNegativeInt
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: PositiveInt
    is_complete: bool = True  # False: without those that no version changes
    probe: ProbeRow | None = None
    files: str = ""  # the folder of the buckets' files, of which all receivers' node has one per bucket; empty: none


class WeightGroupMember(Frozen):
    """A worker that sends or receives weights."""

    node: str  # Ray's id
    gpu: str  # a unique name of the GPU; empty on a CPU
    dtype: str = ""  # of its engine's weights; empty: it has no engine
    version: int | None = None  # that its engine holds; None: none, as a load failed, or it has dropped its weights


class WeightsRoute(Frozen):
    """How a version is sent to some receivers."""

    transport: Transport
    on_gpus: bool  # by NCCL, between GPUs; else by gloo
    dtype: str = "float32"  # of the engines' weights
    is_complete: bool = True  # False: the receivers hold the weights that no version changes


class SentWeights(Frozen):
    """The policy's side of a transfer."""

    version: NonNegativeInt
    num_bytes: PositiveInt  # of one copy of all buckets
    seconds: NonNegativeFloat  # to gather the tensors, fill the buckets, and wait until they are received
    probe_seconds: NonNegativeFloat = 0.0


class LoadedWeights(Frozen):
    """One rollout worker's side of a transfer."""

    version: NonNegativeInt
    num_bytes: PositiveInt
    read_seconds: NonNegativeFloat  # to wait for the buckets, and to verify them
    load_seconds: NonNegativeFloat  # for the engine to copy them into its model
    probe_seconds: NonNegativeFloat = 0.0
    probe_difference: float | None = None  # of the probe row's log-probs from the trainer's, mean, nats; None: no probe


class WeightsTransfer(Frozen):
    """The measurements of one publish; its parts overlap."""

    transport: Annotated[Transport, BeforeValidator(lambda name: _RENAMED.get(name, name))]  # of version 0.2, too
    num_bytes: PositiveInt  # of one copy of the weights that were sent
    num_receivers: NonNegativeInt
    write_seconds: NonNegativeFloat
    read_seconds: NonNegativeFloat  # of the slowest receiver
    load_seconds: NonNegativeFloat  # of the slowest receiver
    probe_seconds: NonNegativeFloat = 0.0  # of the trainer and the slowest receiver
    probe_difference: float | None = None  # of the worst receiver; None: no probe

    @classmethod
    def of(cls, transport: Transport, sent: SentWeights, loaded: Sequence[LoadedWeights]) -> Self:
        """Combine the measurements of the sender and of all receivers."""
        return cls(
            transport=transport,
            num_bytes=sent.num_bytes,
            num_receivers=len(loaded),
            write_seconds=sent.seconds,
            read_seconds=max((each.read_seconds for each in loaded), default=0.0),
            load_seconds=max((each.load_seconds for each in loaded), default=0.0),
            probe_seconds=sent.probe_seconds + max((each.probe_seconds for each in loaded), default=0.0),
            probe_difference=max(
                (each.probe_difference for each in loaded if each.probe_difference is not None), default=None
            ),
        )
