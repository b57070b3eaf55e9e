"""An LLM judge: what it is asked, how its score is read, and its workers if the run has them."""

import re
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from schemas.base import OptionalText
from schemas.config.kinds import TemplateVariables
from schemas.config.reward_base import HostedReward, InProcessReward, IsolatedReward, Pattern, TimeLimit
from schemas.config.rollout import Probability, TransformersRollout, VllmRollout

PROMPT_FIELDS = ("prompt", "response", "answer")
LAST_NUMBER = r"(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+(?:\.\d+)?)?"
"""A number, as the score; that of "8/10" and "8 out of 10" is 8."""
EMPTY_IS_NONE = BeforeValidator(lambda value: None if value == "" else value)  # TOML has no None


def _has_known_fields(template: str) -> str:
    allowed = "{prompt}, {response} and {answer} are filled in; for other braces write {{ and }}"
    try:
        parsed = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"not a template: {error}; {allowed}") from None
    fields = [each for each in parsed if each[0] is not None]
    for name, spec, conversion in fields:
        if name not in PROMPT_FIELDS or spec or conversion:
            raise ValueError(f"unknown field {{{name}}} or a format of it; {allowed}")
    if not any(name == "response" for name, _, _ in fields):
        raise ValueError("without {response} the judge would not see what it judges; add it")
    return template


def _has_group(pattern: str) -> str:
    if not re.compile(pattern).groups:
        raise ValueError(r"no group is the score; put it in parentheses, as in 'Score: (\d+)'")
    return pattern


class JudgedReward(InProcessReward):
    """The base of rewards that an LLM judge gives."""

    prompt: Annotated[str, AfterValidator(_has_known_fields)]
    """The question to the judge, in which `{prompt}`, `{response}` and `{answer}` are filled in."""

    pattern: Annotated[Pattern, AfterValidator(_has_group)] = LAST_NUMBER
    """Group 1 of its last match in the judge's answer is the score; by default the last number ("8/10" is 8)."""

    scale: PositiveFloat = 10.0
    """The best score; one below 0 or above this is a failed reward."""


def _is_base_url(url: str) -> str:
    if "@" in url or "?" in url:
        raise ValueError("a URL with a login or a query; name the key's variable in reward.api_key_variable instead")
    if url.endswith("/chat/completions"):
        raise ValueError("expected the URL that /chat/completions is added to, as in http://localhost:8000/v1")
    return url.rstrip("/")


class JudgeReward(JudgedReward, IsolatedReward):
    """The score that an LLM judge gives, at any endpoint that speaks OpenAI's chat completions, divided by `scale`.

    The parts `judge_prompt_tokens` and `judge_completion_tokens` are what the judge's answer has cost.
    """

    kind: Literal["judge"] = "judge"
    """Selects an LLM judge."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]"), AfterValidator(_is_base_url)]
    """Base URL of the endpoint, such as `http://localhost:8000/v1`."""

    model: Annotated[str, Field(min_length=1)]
    """The judge's name at the endpoint."""

    api_key_variable: OptionalText = None
    """Environment variable of the rollout workers that holds the endpoint's key; None: it needs none."""

    max_tokens: Annotated[PositiveInt | None, EMPTY_IS_NONE] = 1024
    """Most tokens of the judge's answer; "" or None: not sent."""

    temperature: Annotated[NonNegativeFloat | None, EMPTY_IS_NONE] = 0.0
    """The judge's temperature; "" or None: not sent."""

    max_retries: NonNegativeInt = 5
    """Repetitions of a request after a lost connection, or an answer of status 429 or 5xx."""

    concurrency: PositiveInt = 16
    """Most open requests of one reward process; a response's time limit begins with its own."""

    timeout_seconds: TimeLimit = 120.0
    """Time limit per response in seconds, with all repetitions; inf or None: no limit."""

    num_processes: NonNegativeInt = 1
    """Reward processes per rollout worker, each with requests of its own; 0: asked by the rollout worker itself."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_folder(cls, values: Any) -> Any:
        if isinstance(values, dict) and "path" in values:
            raise ValueError(
                'path is the folder of a judge on workers of the run: for that, set kind = "judge_model" and leave url '
                "and model out; else leave path out"
            )
        return values

    @model_validator(mode="after")
    def _names_a_variable(self) -> "JudgeReward":
        # Not a check of the field, whose error would print the value: it may be the key itself.
        if self.api_key_variable is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.api_key_variable):
            raise ValueError("api_key_variable must be the name of an environment variable, not the key itself")
        return self


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
