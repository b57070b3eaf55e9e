"""The base of every value that crosses a process boundary: frozen, strict about its keys, serialized as JSON."""

import hashlib
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

OptionalText = Annotated[str | None, BeforeValidator(lambda text: text or None)]  # an empty text counts as not set


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
    """The base of config sections: the docstring below a field is its description in the schema and the reference."""

    model_config = ConfigDict(use_attribute_docstrings=True)
