"""What a judge is asked, and how its score is read."""

import re
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, PositiveFloat

from schemas.config.reward_base import InProcessReward, Pattern

PROMPT_FIELDS = ("prompt", "response", "answer")
LAST_NUMBER = r"(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+(?:\.\d+)?)?"
"""A number, as the score; that of "8/10" and "8 out of 10" is 8."""


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
