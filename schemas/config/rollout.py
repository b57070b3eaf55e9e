"""How samples are generated."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen


class DynamicSampling(Frozen):
    """DAPO's dynamic sampling: groups of equal rewards teach nothing and are replaced by those of further prompts."""

    max_rounds: PositiveInt = 4  # of generation in one step; after the last one, the step has the groups that it has


class TransformersRollout(Frozen):
    """The embedded engine: batched decoding with a KV cache on the training machine."""

    kind: Literal["transformers"] = "transformers"
    num_prompts: PositiveInt = 16  # prompts per step
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    max_response_tokens: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0  # 0: no limit
    num_workers: PositiveInt = 1
    dynamic_sampling: DynamicSampling | None = None


RolloutConfig = TransformersRollout


class EvalConfig(Frozen):
    """Held-out evaluation: before training, after it, and every `every_steps` steps; sampled in its own way."""

    every_steps: NonNegativeInt = 0  # 0: only before and after
    num_prompts: PositiveInt = 256  # at most; the first ones of the file
    samples_per_prompt: PositiveInt = 1  # the n of mean@n, best@n and maj@n
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0  # 0: no limit
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
