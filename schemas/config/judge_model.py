"""The settings of an LLM judge on workers of the run."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from schemas.config.judged import JudgedReward
from schemas.config.reward_base import HostedReward
from schemas.config.rollout import Probability, TransformersRollout, VllmRollout
from schemas.config.template import TemplateVariables


class JudgeModelReward(JudgedReward, HostedReward):
    """The score that an LLM judge gives, divided by `scale`: a model in an engine, on Ray workers of its own.

    The parts `judge_prompt_tokens` and `judge_completion_tokens` are what the judge's answer has cost.
    """

    kind: Literal["judge_model"] = "judge_model"
    """Selects an LLM judge that the run itself hosts."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the judge's chat template, such as `enable_thinking = false`."""

    max_question_tokens: PositiveInt = 4096
    """Longest question in tokens, with what the chat template adds; the reward of a longer one fails."""

    max_tokens: PositiveInt = 1024
    """Longest answer in tokens; the reward fails if it is cut there."""

    temperature: NonNegativeFloat = 0.0
    """Temperature; 0: greedy. Above it, the seed is a hash of the question, so that equal ones have equal answers."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """The engine, as `rollout.kind`; in float32, but for vLLM on CUDA, which computes in bfloat16."""

    cache_bytes: PositiveInt = 2**30
    """Bytes of the KV cache; what doesn't fit waits. Of vLLM on a GPU, it is what `gpu_memory_utilization` leaves."""

    gpu_memory_utilization: Probability | None = None
    """Fraction of the GPU's memory for vLLM's weights and KV cache; None: 0.85."""

    @property
    def engine_config(self) -> TransformersRollout | VllmRollout:
        """The settings of its engine."""
        if self.engine == "vllm":
            return VllmRollout(cache_bytes=self.cache_bytes, gpu_memory_utilization=self.gpu_memory_utilization)
        return TransformersRollout(max_cache_bytes=self.cache_bytes)

    @model_validator(mode="after")
    def _engine_reserves_memory(self) -> "JudgeModelReward":
        if self.gpu_memory_utilization is not None and self.engine != "vllm":
            raise ValueError(
                f'gpu_memory_utilization = {self.gpu_memory_utilization:g} is a setting of engine = "vllm"; set that '
                "engine, or leave it out"
            )
        return self
