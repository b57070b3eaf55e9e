"""How samples are generated, and by which engine."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen
from schemas.config.kinds import default_kind

Probability = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]


def _stop_string(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{value!r} is no stop string: each must be a text of at least one character; tokens are stopped at by "
            "their numbers, in stop_token_ids"
        )
    return value


def _temperature(value: object) -> object:
    if value == 0:
        raise ValueError("all samples of a prompt would be the same greedy response; set it above 0, e.g. 1.0")
    return value


StopString = Annotated[str, BeforeValidator(_stop_string)]


class DynamicSampling(Frozen):
    """DAPO's dynamic sampling: groups of equal rewards teach nothing and are replaced by those of further prompts."""

    max_rounds: PositiveInt = 4  # of generation in one step; after the last one, the step has the groups that it has


class EngineRollout(Frozen):
    """What every engine is told."""

    num_prompts: PositiveInt = 16  # prompts per step
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    max_response_tokens: PositiveInt = 256
    temperature: Annotated[PositiveFloat, BeforeValidator(_temperature)] = 1.0
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0  # 0: no limit
    min_p: MinP = 0.0  # tokens less likely than this share of the likeliest one's probability are not drawn
    stop: tuple[StopString, ...] = ()  # a response ends with the token that completes one of these texts
    stop_token_ids: tuple[NonNegativeInt, ...] = ()  # beside the model's own end-of-sequence tokens
    num_workers: PositiveInt = 1
    batch_prompts: PositiveInt | None = None  # generated together by one worker; None: num_prompts over num_workers
    dynamic_sampling: DynamicSampling | None = None

    @property
    def prompts_per_batch(self) -> int:
        """How many prompts are generated together: the work that is dealt to whichever worker is free."""
        return self.batch_prompts or -(-self.num_prompts // self.num_workers)


class TransformersRollout(EngineRollout):
    """The embedded engine: batched decoding of the transformers model with a KV cache."""

    kind: Literal["transformers"] = "transformers"
    max_cache_bytes: PositiveInt = 2**32  # of the KV cache; more prompts than fit are decoded one batch after another


class VllmRollout(EngineRollout):
    """vLLM, in the rollout worker's own process; extra `cpu` or `cuda`."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights, activations and KV cache
    max_num_seqs: PositiveInt = 256  # decoded at the same time
    cache_bytes: PositiveInt = 2**30  # of the KV cache, on a CPU
    gpu_memory_utilization: Probability = 0.4  # share of the GPU's memory for weights and KV cache
    enforce_eager: bool = True  # on a GPU, false captures CUDA graphs: a slower start, faster decoding


RolloutConfig = Annotated[
    Annotated[TransformersRollout | VllmRollout, Field(discriminator="kind")], default_kind("transformers")
]


class EvalConfig(Frozen):
    """Held-out evaluation: before training, after it, and every `every_steps` steps; sampled in its own way."""

    every_steps: NonNegativeInt = 0  # 0: only before and after
    num_prompts: PositiveInt = 256  # at most; the first ones of the file
    samples_per_prompt: PositiveInt = 1  # the n of mean@n, best@n and maj@n
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # 0: greedy
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0  # 0: no limit
    min_p: MinP = 0.0
    max_response_tokens: PositiveInt | None = None  # None: the rollout's
    accuracy_threshold: float = 0.99  # a reward of at least this counts as correct

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvalConfig":
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples_per_prompt = {self.samples_per_prompt} with eval.temperature = 0 would draw the same "
                "greedy response each time; set eval.temperature above 0, e.g. 1.0, or eval.samples_per_prompt = 1"
            )
        return self
