"""The base of every value that crosses a process boundary: frozen, strict about its keys, serialized as JSON."""

import hashlib
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from schemas.scalars import mixed_up

OptionalText = Annotated[str | None, BeforeValidator(lambda text: None if text == "" else text)]  # empty: not set


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
    """The base of config sections: the docstring below a field is its description in the schema and the reference.

    A number is no truth value, and the reverse. It is finite, unless its type says otherwise: JSON has no other.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

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
