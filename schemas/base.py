"""The base of every value that crosses a process boundary: frozen, strict about its keys, serialized as JSON."""

import hashlib
from typing import Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable pydantic model; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def replace(self, **changes: object) -> Self:
        """Return a copy with `changes` applied and validated again."""
        return type(self).model_validate({**dict(self), **changes})

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the value's JSON; equal values have equal digests."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class FrozenConfig(Frozen):
    """The base of config sections: the docstring below a field is its description in the schema and the reference."""

    model_config = ConfigDict(use_attribute_docstrings=True)
