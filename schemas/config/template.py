"""Variables of a chat template."""

from typing import Annotated

from pydantic import AfterValidator

_TEMPLATE_OPTIONS = {"conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}


def _not_sluices_own(given: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
    if own := sorted(given.keys() & _TEMPLATE_OPTIONS):
        raise ValueError(f"{', '.join(own)} can't be set: Sluice renders prompts as messages with a generation prompt")
    return given


TemplateVariables = Annotated[dict[str, bool | int | float | str], AfterValidator(_not_sluices_own)]
