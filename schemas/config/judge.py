"""An LLM judge: what it is asked, and how its score is read."""

import re
from string import Formatter
from typing import Annotated, Literal

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
from schemas.config.reward_base import IsolatedReward, Pattern, TimeLimit

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


def _is_base_url(url: str) -> str:
    if "@" in url or "?" in url:
        raise ValueError("a URL with a login or a query; name the key's variable in reward.api_key_variable instead")
    if url.endswith("/chat/completions"):
        raise ValueError("expected the URL that /chat/completions is added to, as in http://localhost:8000/v1")
    return url.rstrip("/")


class JudgeReward(IsolatedReward):
    """The score that an LLM judge gives, at any endpoint that speaks OpenAI's chat completions, divided by `scale`.

    The parts `judge_prompt_tokens` and `judge_completion_tokens` are what the judge's answer has cost.
    """

    kind: Literal["judge"] = "judge"

    prompt: Annotated[str, AfterValidator(_has_known_fields)]
    """The question to the judge, in which `{prompt}`, `{response}` and `{answer}` are filled in."""

    pattern: Annotated[Pattern, AfterValidator(_has_group)] = LAST_NUMBER
    """Group 1 of its last match in the judge's answer is the score; by default the last number ("8/10" is 8)."""

    scale: PositiveFloat = 10.0
    """The best score; one below 0 or above this is a failed reward."""

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

    @model_validator(mode="after")
    def _names_a_variable(self) -> "JudgeReward":
        # Not a check of the field, whose error would print the value: it may be the key itself.
        if self.api_key_variable is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.api_key_variable):
            raise ValueError("api_key_variable must be the name of an environment variable, not the key itself")
        return self
