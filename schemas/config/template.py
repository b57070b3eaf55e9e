"""Variables of a chat template."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

_TEMPLATE_OPTIONS = {"conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}

Variable = bool | int | float | str


def _one_value(value: object) -> object:
    if not isinstance(value, Variable):
        raise ValueError("expected a truth value, a number or a string")  # one line, not one for each of them
    return value


def _not_sluices_own(given: dict[str, Variable]) -> dict[str, Variable]:
    if own := sorted(given.keys() & _TEMPLATE_OPTIONS):
        raise ValueError(f"{', '.join(own)} can't be set: Sluice renders prompts as messages with a generation prompt")
    return given


TemplateVariables = Annotated[
    dict[str, Annotated[Variable, BeforeValidator(_one_value)]], AfterValidator(_not_sluices_own)
]
