"""A section of which there are several kinds, one of them meant where none is named."""

from collections.abc import Callable

from pydantic import BeforeValidator


def default_kind(kind: str) -> BeforeValidator:
    """Read a section without a `kind` as one of this kind."""

    def with_kind(value: object) -> object:
        return {"kind": kind, **value} if isinstance(value, dict) else value

    validate: Callable[[object], object] = with_kind
    return BeforeValidator(validate)
