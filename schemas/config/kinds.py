"""Values that several sections have: kinds (`kind` chooses the class), import paths, JSON, template variables."""

import json
import math
import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

_PATTERN = r"^[\w.]+:\w+$"
_TEMPLATE_OPTIONS = {"conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}
CLOCK = "strftime_now"
"""What templates ask for today's date; as a variable, the date that they take for it."""
Variable = bool | int | float | str


def default_kind(kind: str) -> BeforeValidator:
    """Return a validator that reads a section without a `kind` as one of this kind."""

    def with_kind(value: object) -> object:
        return {"kind": kind, **value} if isinstance(value, dict) else value

    validate: Callable[[object], object] = with_kind
    return BeforeValidator(validate)


def kind_of(config: type[BaseModel]) -> str:
    """Return the `kind` of a config class.

    Raises:
        TypeError: The class has no field `kind` with a string as its default.
    """
    field = config.model_fields.get("kind")
    if field is None or not isinstance(field.default, str):
        raise TypeError(f'{config.__name__} has no `kind: Literal["..."] = "..."`')
    return field.default


def configs_of(union: object) -> tuple[type[BaseModel], ...]:
    """Return the config classes of a union alias such as `AdvantageConfig`, in order.

    Raises:
        TypeError: A member is no config class.
    """
    members = list(union_members(union))
    configs = [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]
    if len(configs) < len(members):
        raise TypeError(f"{union!r} is not a union of config classes")
    return tuple(dict.fromkeys(configs))


def union_members(annotation: object) -> Iterator[object]:
    """Yield the members of a union, or another type itself, without what annotates them."""
    if get_origin(annotation) is Annotated:
        yield from union_members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from union_members(member)
    else:
        yield annotation


def _is_import_path(path: str) -> str:
    if not re.fullmatch(_PATTERN, path):
        raise ValueError("expected module:name, such as my_env:Game")
    return path


ImportPath = Annotated[str, AfterValidator(_is_import_path), Field(json_schema_extra={"pattern": _PATTERN})]


def _survives_json(values: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected text, finite numbers, truth values, lists and tables: {error}") from None
    return values


JsonObject = Annotated[dict[str, Any], AfterValidator(_survives_json)]


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
