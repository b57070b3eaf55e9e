"""The settings of an LLM judge."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from schemas.base import OptionalText
from schemas.config.judged import JudgedReward
from schemas.config.reward_base import IsolatedReward, TimeLimit

EMPTY_IS_NONE = BeforeValidator(lambda value: None if value == "" else value)  # TOML has no None


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
