"""Telling truth values and numbers apart, which pydantic converts into each other."""

from typing import Any, Literal, get_args, get_origin

from schemas.config.kinds import union_members


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
