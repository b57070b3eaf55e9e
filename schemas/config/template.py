"""Variables of a chat template."""

import math
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

_TEMPLATE_OPTIONS = {"conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}

CLOCK = "strftime_now"
"""What templates ask for today's date; as a variable, the date that they take for it."""

Variable = bool | int | float | str


def _one_value(value: object) -> object:
    if not isinstance(value, Variable):
        hint = "; to turn an option off, write false" if value is None else ""
        raise ValueError(f"expected a truth value, a number or a string{hint}")  # one line, not one for each of them
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if isinstance(value, str) and value.casefold() in ("true", "false"):
        raise ValueError(f"a template takes any text for true; write {value.casefold()} without quotes")
    return value


def _not_sluices_own(given: dict[str, Variable]) -> dict[str, Variable]:
    if own := sorted(given.keys() & _TEMPLATE_OPTIONS):
        raise ValueError(f"{', '.join(own)} can't be set: Sluice renders prompts as messages with a generation prompt")
    return given


TemplateVariables = Annotated[
    dict[str, Annotated[Variable, BeforeValidator(_one_value)]], AfterValidator(_not_sluices_own)
]
