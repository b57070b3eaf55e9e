"""Values of `section.key=value` overrides: text for keys that take text alone, else TOML, JSON or Python."""

import ast
import json
import tomllib
import warnings
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from schemas.errors import ConfigError

_NOTHING = ("None", "null")
# Words that some languages read as a truth value or nothing, and a chat template as a text, which is true.
_AMBIGUOUS = {"true", "false", "yes", "no", "on", "off", "none", "null", "nil", "y", "n"}


def parse_value(text: str, types: Sequence[object], override: str) -> Any:
    """Return the value that a text stands for.

    A key that takes text alone gets the text as it is, or what is between its quotes. Otherwise the text is read as a
    value of TOML (`true`, `[1, 2]`), JSON (`null`) or Python (`True`, `None`, `.5`); what is none of these is text.

    Args:
        text: The part behind the first `=`.
        types: The types that the key may have; empty: it isn't known.
        override: The whole override, for messages.

    Raises:
        ConfigError: It is a list or a table that can't be read, or may be meant as a truth value as well as text.

    Example:
        >>> [parse_value(text, [int, bool, str], "") for text in ("False", "false", "1e3", ".5", "2024-01-01", "x")]
        [False, False, 1000.0, 0.5, '2024-01-01', 'x']
        >>> [parse_value(text, [str, NoneType], "") for text in ("False", "2024", '"a b"', "None")]
        ['False', '2024', 'a b', None]
    """
    if types and all(map(_is_text, types)):
        return None if NoneType in types and text in _NOTHING else _unquoted(text)
    for read in (_read_toml, json.loads, _read_python):
        try:
            return _plain(read(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    key = override.partition("=")[0]
    if text[:1] in ("[", "{"):
        raise ConfigError(
            f"override {override!r} is neither TOML, JSON nor Python; put text into quotes, as in {key}=['a', 'b'] or "
            f"{key}={{name='a', flag=true}}"
        )
    if text.casefold() in _AMBIGUOUS and (Any in types or {bool, str} <= set(types)):
        raise ConfigError(
            f"override {override!r}: {text} would be a text, which counts as true; write true or false, or put the "
            f"text into quotes: '{key}=\"{text}\"'"
        )
    return text


def _is_text(each: object) -> bool:
    if get_origin(each) is Literal:
        return all(isinstance(value, str) for value in get_args(each))
    return each in (str, NoneType)


def _unquoted(text: str) -> str:
    """Return what is between a text's quotes, if it has some, by the rules of TOML or Python."""
    if len(text) < 2 or text[0] not in ("'", '"') or text[-1] != text[0]:
        return text
    for read in (_read_toml, _read_python):
        try:
            if isinstance(value := read(text), str):
                return value
        except (ValueError, SyntaxError):
            continue
    return text


def _read_toml(text: str) -> Any:
    if (tree := tomllib.loads(f"value = {text}")).keys() != {"value"}:
        raise ValueError("more than a value")
    return tree["value"]


def _read_python(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as \d in a quoted text
        return ast.literal_eval(text)


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str | list | tuple | dict | None):  # a date, bytes, a set
        raise ValueError("not a type of a config")
    return value
