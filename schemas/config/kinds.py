"""Sections with several kinds: unions of config classes, discriminated by the field `kind`."""

from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator


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
    """Return the config classes of a union alias such as `AdvantageConfig`, in order."""
    return tuple(dict.fromkeys(_members(union)))


def kinds_of(union: object) -> tuple[str, ...]:
    """Return the kinds of a union alias such as `AdvantageConfig`, in order.

    Raises:
        TypeError: A member of the union has no kind.
    """
    return tuple(kind_of(config) for config in configs_of(union))


def _members(union: object) -> Iterator[type[BaseModel]]:
    if isinstance(union, type) and issubclass(union, BaseModel):
        yield union
    elif get_origin(union) is Annotated:
        yield from _members(get_args(union)[0])
    elif get_origin(union) in (Union, UnionType):
        for member in get_args(union):
            yield from _members(member)
    else:
        raise TypeError(f"{union!r} is not a union of config classes")
