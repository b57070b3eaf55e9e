"""The base of every value that crosses a process boundary: frozen, strict about its keys, serialized as JSON.

Truth values and numbers, which pydantic converts into each other, are told apart.
"""

import hashlib
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from schemas.config.kinds import union_members

OptionalText = Annotated[str | None, BeforeValidator(lambda text: None if text == "" else text)]  # empty: not set


def mixed_up(annotation: object, value: object) -> str | None:
    """Return what is expected if a value, or an entry of it, is a truth value in place of a number, or the reverse.

    Args:
        annotation: The type that the value must have.
        value: The value as given, which may be a list or a table.

    Example:
        >>> mixed_up(tuple[float, ...], [True, 1.5]), mixed_up(tuple[float, ...], [0, 1.5])
        ('expected a number, not a truth value', None)
    """
    types = list(union_members(annotation))
    if isinstance(value, bool):
        if _takes(types, int, float) and not _takes(types, bool):
            return "expected a number, not a truth value"
    elif isinstance(value, int | float | str):
        if _takes(types, bool) and not _takes(types, int, float, str):
            return "expected true or false"
    else:
        found = (mixed_up(entry_type, entry) for entry_type, entry in _entries(types, value))
        return next(filter(None, found), None)
    return None


def _takes(types: list[object], *wanted: type) -> bool:
    return any(
        each is Any
        or each in wanted
        or (get_origin(each) is Literal and any(type(a) in wanted for a in get_args(each)))
        for each in types
    )


def _entries(types: list[object], value: object) -> list[tuple[object, object]]:
    """Return the entries of a list or table, each with its type."""
    entries: list[tuple[object, object]] = []
    for each in types:
        arguments = get_args(each)
        if get_origin(each) in (tuple, list) and isinstance(value, tuple | list):
            is_fixed = get_origin(each) is tuple and ... not in arguments
            entries += zip(arguments if is_fixed else arguments[:1] * len(value), value, strict=False)
        elif get_origin(each) is dict and isinstance(value, dict):
            entries += ((arguments[1], entry) for entry in value.values())
    return entries


class Frozen(BaseModel):
    """An immutable pydantic model; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def replace(self, **changes: object) -> Self:
        """Return a copy with `changes` applied and validated again."""
        return type(self).model_validate({**dict(self), **changes})

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the value's JSON; equal values have equal digests."""
        return digest_of(self.model_dump_json())


def digest_of(text: str) -> str:
    """Return the first 16 hex digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class FrozenConfig(Frozen):
    """The base of config sections: the docstring below a field, except a `kind`, is its description in the schema.

    A number is no truth value, and the reverse. It is finite, unless its type says otherwise: JSON has no other.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        kind = vars(cls).get("kind")
        if get_args(cls.__annotations__.get("kind")) == (kind,):
            cls.kind = Field(kind, description=f"`{kind}` selects this section.")  # type: ignore[attr-defined]

    @model_validator(mode="wrap")
    @classmethod
    def _has_scalars_of_its_types(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        valid = validate(given)  # first, as a type's own message is the better one
        fields = cls.model_fields if isinstance(given, dict) else {}
        errors = [
            InitErrorDetails(type=PydanticCustomError("scalar", problem), loc=(name,), input=given[name])
            for name, field in fields.items()
            if name in given and (problem := mixed_up(field.annotation, given[name])) is not None
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return valid
