"""Rollout engines, sampling, and held-out evaluation."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import FrozenConfig
from schemas.config.kinds import JsonObject, default_kind
from schemas.placement import Device

OWN_GPU_FRACTION, COLOCATED_GPU_FRACTION = 0.85, 0.4  # of a GPU's memory, for an engine

EngineDtype = Literal["float32", "bfloat16"]
Probability = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]


def _stop_string(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{value!r} is not a stop string, expected a string of at least one character; use stop_token_ids for "
            "token ids"
        )
    return value


def _temperature(value: object) -> object:
    if value == 0:
        raise ValueError("all samples of a prompt would be the same greedy response; set it above 0, e.g. 1.0")
    return value


StopString = Annotated[str, BeforeValidator(_stop_string)]


class DynamicSampling(FrozenConfig):
    """DAPO's dynamic sampling: zero-variance groups are replaced by groups of further prompts."""

    max_rounds: PositiveInt = 4
    """Maximum rounds of generation in a step; after the last one, the step trains on the groups that it has."""


class EngineRollout(FrozenConfig):
    """Settings of every engine."""

    num_prompts: PositiveInt = 16
    """Prompts per step."""

    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Samples per prompt, the size of a group."""

    max_response_tokens: PositiveInt = 256
    """Longest response in tokens; longer ones are truncated."""

    temperature: Annotated[PositiveFloat, BeforeValidator(_temperature)] = 1.0
    """Sampling temperature."""

    top_p: Probability = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: no limit."""

    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: no limit."""

    min_p: MinP = 0.0
    """Don't sample tokens less likely than this fraction of the most likely token's probability; 0: no limit."""

    stop: tuple[StopString, ...] = ()
    """Strings that end a response: its last token is the one that completes one of them."""

    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, in addition to the model's own end-of-sequence tokens."""

    num_workers: PositiveInt = 1
    """Number of rollout workers, each with its own engine."""

    batch_prompts: PositiveInt | None = None
    """Prompts that one worker generates together; None: `num_prompts` / `num_workers`, rounded up."""

    router_replay: bool = False
    """Record the experts that the engine routes each token to, and score with them; mixtures of experts only."""

    sampling_mask: bool = False
    """Record which tokens `top_p`, `top_k` and `min_p` leave at each position, and score over these alone."""

    dynamic_sampling: DynamicSampling | None = None
    """Dynamic sampling; None: zero-variance groups are kept, with advantages of 0."""

    @property
    def prompts_per_batch(self) -> int:
        """Prompts that are generated together: the unit of work that is dispatched to a free worker."""
        return self.batch_prompts or -(-self.num_prompts // self.num_workers)

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of one engine, all on one node; without GPUs, its processes."""
        return 1

    def dtype_on(self, device: Device) -> EngineDtype:
        """Return the dtype of weights and KV cache on a device."""
        return "float32"


class TransformersRollout(EngineRollout):
    """The embedded engine: batched decoding of the transformers model with a KV cache."""

    kind: Literal["transformers"] = "transformers"

    max_cache_bytes: PositiveInt = 2**32
    """Maximum bytes of the KV cache; prompts that don't fit are decoded in further batches."""


class ProcessRollout(EngineRollout):
    """Settings of an engine in a process of its own, or in one per GPU."""

    python: str | None = None
    """The engine's interpreter, such as `vllm-venv/bin/python` of `sluice engine install`; None: the run's own."""

    tensor_parallel: PositiveInt = 1
    """GPUs of one engine, all on one node, over which it shards each layer; on a CPU, its processes."""

    dtype: EngineDtype | None = None
    """Dtype of weights, activations and KV cache; None: bfloat16 on CUDA, float32 on a CPU."""

    max_num_seqs: PositiveInt = 256
    """Maximum number of sequences that are decoded at the same time."""

    cache_bytes: PositiveInt = 2**30
    """Bytes of the KV cache on a CPU."""

    gpu_memory_utilization: Probability | None = None
    """Fraction of each GPU's memory for weights and KV cache; None: 0.85, or 0.4 if the workers are colocated."""

    prefix_cache: Literal["call", "version"] = "call"
    """Lifetime of cached prefixes: one call, whose samples can then be repeated bit for bit; or one policy version."""

    @model_validator(mode="after")
    def _returns_no_experts_and_masks(self) -> Self:
        needed = {"router_replay": "experts that the engine chose", "sampling_mask": "tokens that truncation left"}
        for key, what in needed.items():
            if getattr(self, key):
                raise ValueError(
                    f"rollout.{key} = true needs the {what}, which the protocol of engines does not have (vLLM returns "
                    "them only from a model runner that its CPU build lacks and Sluice doesn't use); set "
                    f'rollout.{key} = false, or rollout.kind = "transformers"'
                )
        return self

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of one engine, all on one node; without GPUs, its processes."""
        return self.tensor_parallel

    def dtype_on(self, device: Device) -> EngineDtype:
        """Return the dtype on a device."""
        return self.dtype or ("bfloat16" if device == "cuda" else "float32")

    def gpu_fraction(self, *, is_colocated: bool) -> float:
        """Return the fraction of each GPU's memory for weights and KV cache."""
        return self.gpu_memory_utilization or (COLOCATED_GPU_FRACTION if is_colocated else OWN_GPU_FRACTION)


class VllmRollout(ProcessRollout):
    """vLLM."""

    kind: Literal["vllm"] = "vllm"

    enforce_eager: bool = False
    """On CUDA, compile nothing and capture no CUDA graphs: a faster start, slower decoding. A CPU always does so."""


class ProgramRollout(ProcessRollout):
    """An engine of your own: a program that answers the calls of docs/how-to/engine.md."""

    kind: Literal["program"] = "program"

    program: Annotated[str, Field(min_length=1)]
    """Path of the Python file that `python` runs."""

    settings: JsonObject = Field(default_factory=dict)
    """What the program gets besides the model and its sizes, in JSON's types."""


RolloutConfig = Annotated[
    Annotated[TransformersRollout | VllmRollout | ProgramRollout, Field(discriminator="kind")],
    default_kind("transformers"),
]


class EvalConfig(FrozenConfig):
    """Held-out evaluation before and after training and every `every_steps` steps, with its own sampling settings."""

    every_steps: NonNegativeInt = 0
    """Steps between two evaluations during training; 0: only before and after."""

    num_prompts: PositiveInt = 256
    """Maximum number of held-out prompts, from the start of the file."""

    batch_prompts: PositiveInt = 64
    """Prompts that one rollout worker generates together; the batches don't depend on the number of workers."""

    samples_per_prompt: PositiveInt = 1
    """Samples per prompt, the n of mean@n, best@n and maj@n."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0: greedy."""

    top_p: Probability = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: no limit."""

    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: no limit."""

    min_p: MinP = 0.0
    """Don't sample tokens less likely than this fraction of the most likely token's probability; 0: no limit."""

    max_response_tokens: PositiveInt | None = None
    """Longest response in tokens; None: `rollout.max_response_tokens`."""

    accuracy_threshold: float = 0.99
    """A sample is correct if its reward is at least this."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvalConfig":
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples_per_prompt = {self.samples_per_prompt} with eval.temperature = 0 would sample the same "
                "greedy response each time; set eval.temperature above 0, e.g. 1.0, or eval.samples_per_prompt = 1"
            )
        return self
