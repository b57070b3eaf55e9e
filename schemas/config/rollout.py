"""How samples are generated."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

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
    """Held-out evaluation: before training, after it, and every `every_steps` steps."""

    every_steps: NonNegativeInt = 0  # 0: only before and after
    num_prompts: PositiveInt = 256  # at most; the first ones of the file
    temperature: NonNegativeFloat = 0.0  # 0: greedy
    accuracy_threshold: float = 0.99  # a reward of at least this counts as correct
