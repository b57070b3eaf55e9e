"""Parsers of tool calls in a model's text, by name.

What comes before the first `</think>` is the model's reasoning: a call that is written there is not one. In the JSON of
a call, `</think>` and `</tool_call>` are text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isinf
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_DIGITS = 1000  # of an integer; Python itself refuses to print one of more than 4300


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


class MalformedCall(NamedTuple):
    """A call that can't be read, and what the model should know about it."""

    reason: str


ParsedCalls = Sequence[Call | MalformedCall]
"""A turn's calls in order; empty: the turn is an answer."""

_CALL = '{"name": "...", "arguments": {...}}'
_TAGS = f"<tool_call>{_CALL}</tool_call>"
_END_OF_CALL, _END_OF_REASONING = "</tool_call>", "</think>"
_BEGIN_OF_CALL = re.compile(r"<tool_call>\s*")
_BEGIN_OF_JSON = re.compile(r"\A\s*(?:```\w*\n\s*)?(?=[{\[])|<tool_call>\s*")  # of a call, or of a whole turn
_FENCED = re.compile(r"```\w*\n(.*)```", re.DOTALL)


def parse_hermes(text: str) -> ParsedCalls:
    """Return the calls between `<tool_call>` and `</tool_call>`, whatever is around them.

    >>> parse_hermes('Let me see: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1})]
    """
    text, calls, at = without_reasoning(text), list[Call | MalformedCall](), 0
    while begin := _BEGIN_OF_CALL.search(text, at):
        end = text.find(_END_OF_CALL, _end_of_json(text, begin.end()))
        if end < 0:
            return [*calls, MalformedCall(f"The call has no {_END_OF_CALL} at its end. Write {_TAGS}")]
        calls.append(_read(text[begin.end() : end], _TAGS))
        at = end + len(_END_OF_CALL)
    return calls


def parse_json(text: str) -> ParsedCalls:
    """Return the call that the whole text is, with or without a code fence; any other text is an answer.

    >>> parse_json('{"name": "add", "arguments": {"a": 1}}')
    [Call(name='add', arguments={'a': 1})]
    >>> parse_json('{"sum": 3}')
    []
    """
    text = without_reasoning(text).strip()
    if fenced := _FENCED.fullmatch(text):
        text = fenced[1].strip()
    if not text.startswith("{"):
        return []
    try:
        value = _decode(text)
    except ValueError:
        return [_read(text, _CALL)]
    return [_read(text, _CALL)] if "name" in value and ("arguments" in value or "parameters" in value) else []


PARSERS: Mapping[str, Callable[[str], ParsedCalls]] = MappingProxyType({"hermes": parse_hermes, "json": parse_json})
"""Parsers of a turn's text, by the config's `parser`."""


def without_reasoning(text: str) -> str:
    """Return what follows the first `</think>` that isn't in the JSON of a call, or the whole text if there is none.

    >>> without_reasoning('I call it.</think>{"name": "add", "arguments": {}}')
    '{"name": "add", "arguments": {}}'
    >>> without_reasoning('{"name": "say", "arguments": {"text": "</think>"}}')
    '{"name": "say", "arguments": {"text": "</think>"}}'
    """
    at = 0  # before here there is none
    for begin in _BEGIN_OF_JSON.finditer(text):
        if begin.start() >= at:
            if _END_OF_REASONING in text[at : begin.start()]:
                break
            at = _end_of_json(text, begin.end())
    _, end, rest = text[at:].partition(_END_OF_REASONING)
    return rest if end else text


def _end_of_json(text: str, begin: int) -> int:
    """Return where the JSON value that begins there ends, or where it first is not JSON."""
    try:
        return _SCANNER.raw_decode(text, begin)[1]
    except json.JSONDecodeError as error:
        return error.pos
    except RecursionError:  # which is no call
        return begin


def _read(text: str, form: str) -> Call | MalformedCall:
    try:
        return _call(_decode(text))
    except ValueError as error:
        return MalformedCall(f"The call is malformed: {error}. Write {form}")


def _call(value: Any) -> Call:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if not isinstance(name := value.get("name"), str):
        raise ValueError('"name" must be the name of a tool')
    given = [key for key in ("arguments", "parameters") if key in value]
    if len(given) != 1:
        raise ValueError('it has both "arguments" and "parameters"' if given else '"arguments" is missing')
    arguments = value[given[0]]
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f'"{given[0]}" must be a JSON object')
    return Call(name, arguments)


def _decode(text: str) -> Any:
    """Return the value of strict JSON, all of which can be written as JSON, and in UTF-8, again."""
    try:
        value = _DECODER.decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _float(digits: str) -> float:
    if isinf(value := float(digits)):
        raise ValueError("a number is too large")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


_SCANNER = json.JSONDecoder(parse_int=len, parse_float=len)  # of which only the end matters
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)
