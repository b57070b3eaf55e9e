"""One row of prompt data: its chat, its answer, and what its reward function receives."""

import json
import re
from dataclasses import dataclass
from typing import Any

from infra.datasets.columns import CONVERSION, REQUIRED_COLUMNS, UNSUPPORTED_COLUMNS
from rl_core.rollout.chat import REASONING
from rl_core.rollout.control_tokens import Messages
from schemas.errors import DataError

_ROLES = {"human": "user", "gpt": "assistant"}  # of chats with `from` and `value`
_CHAT = '[{"role": "user", "content": "..."}]'
_OF_ROLE = {"assistant": ("tool_calls", *REASONING), "tool": ("name", "tool_call_id")}  # of chats with whole turns
_CALLS = '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
_CHAT_TEXT = re.compile(r"\s*\[?\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:.*\}\s*\]?\s*", re.DOTALL)
_PYTHON_OBJECT = re.compile(r"\s*\{\s*'.*\}\s*", re.DOTALL)


@dataclass(frozen=True)
class ParsedRow:
    """A well-formed row that is not tokenized yet."""

    messages: Messages
    answer: str
    info: dict[str, Any]  # `extra_info` and `data_source`


def parse_row(place: str, row: dict[str, Any]) -> ParsedRow:
    """Check a row, and return what it holds.

    Args:
        place: Names the row in errors.
        row: The row's columns, JSON values; `reward_model` and `extra_info` may also be JSON texts of objects.

    Raises:
        DataError: A column is missing, malformed, can't be UTF-8, or isn't supported; the message names row and column.
    """
    for name in REQUIRED_COLUMNS:
        if row.get(name) is None:
            raise DataError(
                f"{place}: column {name!r} is missing or null; every row needs {', '.join(REQUIRED_COLUMNS)}: "
                f"write them, {CONVERSION}"
            )
    for name, advice in UNSUPPORTED_COLUMNS.items():
        if row.get(name) not in (None, "", [], {}):
            raise DataError(f"{place}: the column {name!r} can't be part of the prompt: {advice}")
    source = row["data_source"]
    if not isinstance(source, str) or not source:
        raise DataError(f"{place}: data_source is {source!r:.80}; expected a non-empty string")
    answer = _object(place, "reward_model", row["reward_model"], 'expected {"ground_truth": "..."}').get("ground_truth")
    if answer is None:
        raise DataError(f"{place}: reward_model.ground_truth is missing or null; expected the answer as a string")
    extra = row.get("extra_info")
    info = {} if extra is None else _object(place, "extra_info", extra, "expected an object, or null")
    if info.get("data_source", source) != source:
        raise DataError(
            f"{place}: extra_info.data_source is {info['data_source']!r:.80}, but the row's data_source is "
            f"{source!r:.80}, which rewards receive under that name; rename the one in extra_info"
        )
    parsed = ParsedRow(
        messages=parse_messages(place, row["prompt"]),
        answer=answer if isinstance(answer, str) else json.dumps(answer),
        info={**info, "data_source": source},
    )
    for name, value in {"data_source": source, "reward_model.ground_truth": answer, "extra_info": info}.items():
        text = value if isinstance(value, str) else _json(f"{place}: {name}", value)
        _require_utf8(f"{place}: {name}", text)
    return parsed


def parse_messages(place: str, prompt: Any, column: str = "prompt", *, whole_turns: bool = False) -> Messages:
    """Return a chat's messages, each with the texts of its `role` and `content` alone.

    Args:
        place: Names the row in errors.
        prompt: A chat list of `role` and `content`, which may be a list of text parts, or of `from` and `value`; one
            such message; the JSON text of these; or the text of a single message of the user.
        column: Its name.
        whole_turns: Whether turns of the model may have `REASONING` and `tool_calls`, and messages of a tool `name` and
            `tool_call_id`, which are returned, too. A call's arguments are an object, or the JSON text of one.

    Raises:
        DataError: It is none of these, is empty, or has what the prompt can't have.
    """
    chat = _chat_of_text(place, prompt, column) if isinstance(prompt, str) else prompt
    chat = [chat] if isinstance(chat, dict) else chat
    if not isinstance(chat, list):
        raise DataError(f"{place}: {column} is {type(chat).__name__}; expected a chat list, e.g. {_CHAT}")
    messages = [
        _parse_message(f"{place}: {column}[{index}]", message, whole_turns) for index, message in enumerate(chat)
    ]
    if not any(message["content"].strip() or "tool_calls" in message for message in messages):
        raise DataError(f"{place}: the {column} is empty; give at least one message with content, or remove the row")
    return messages


def _chat_of_text(place: str, text: str, column: str) -> Any:
    """Return the chat, or the message, that a text is the JSON of (not Python's repr); else one message of the user."""
    if text.lstrip().startswith(("[", "{")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            if mark := _CHAT_TEXT.fullmatch(text):
                advice = _of_python(column) if mark[1] == "'" else f"{error}; correct it"
                raise DataError(
                    f"{place}: {column} is the text of a chat, {text!r:.80}, but not JSON: {advice}"
                ) from None
        else:
            chat = found if isinstance(found, list) else [found]
            if chat and all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in chat):
                return chat
    return [{"role": "user", "content": text}]


def _of_python(column: str) -> str:
    """Say how Python's text of a column, which `to_csv` of pandas and datasets writes, becomes JSON."""
    return (
        "it is Python's, which to_csv writes; save the rows with to_parquet, or convert the column: "
        f"row[{column!r}] = json.dumps(ast.literal_eval(row[{column!r}]))"
    )


def _parse_message(place: str, message: Any, whole_turns: bool) -> dict[str, Any]:
    if isinstance(message, dict) and "from" in message and "role" not in message:
        message = {("role" if key == "from" else "content" if key == "value" else key): message[key] for key in message}
        message["role"] = _ROLES.get(message["role"], message["role"])
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = "".join(_text_of_part(place, part) for part in content)
    is_named = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not is_named or not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
        raise DataError(f"{place} is {message!r:.80}; expected strings for role and content")
    optional = _OF_ROLE.get(message["role"], ()) if whole_turns else ()
    given = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if more := [key for key in given if key not in ("role", "content", *optional)]:
        raise DataError(
            f"{place}, of role {message['role']!r}, has {', '.join(map(repr, more))}, which the prompt would lack; "
            "write what the model is to read of it into content, or remove it"
        )
    parsed = {
        "role": message["role"],
        "content": content or "",
        **{key: given[key] for key in optional if key in given},
    }
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_calls(place, parsed["tool_calls"])
    if not all(isinstance(value, str) for key, value in parsed.items() if key != "tool_calls"):
        raise DataError(f"{place} is {message!r:.80}; expected strings for {', '.join(parsed)}")
    _require_utf8(place, _json(place, parsed))
    return parsed


def _parse_calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Return a turn's tool calls, their arguments as objects: what chat templates write, and TRL's data sets have."""
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(calls, list):
            raise DataError(f"{place}.tool_calls is {calls!r:.80}; expected a list such as {_CALLS}")
        parts = ((call, ("type", "id", "function")), (function, ("name", "arguments")))
        if more := [key for part, known in parts for key in part if key not in known and part[key] is not None]:
            raise DataError(f"{place}.tool_calls has {', '.join(map(repr, more))}; expected calls such as {_CALLS}")
    return [
        {
            "type": "function",
            **({"id": call["id"]} if call.get("id") else {}),
            "function": {
                "name": call["function"]["name"],
                "arguments": _parse_arguments(place, call["function"].get("arguments")),
            },
        }
        for call in calls
    ]


def _parse_arguments(place: str, arguments: Any) -> dict[str, Any]:
    """Return a call's arguments; of a JSON text, exactly. Of an object, nulls are dropped, see `without_nulls`."""
    found = _object(place, "the arguments of a tool call", arguments or {}, "expected an object, or its JSON text")
    return found if isinstance(arguments, str) else without_nulls(found)


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the nulls of its objects.

    Parquet gives all structs of a column the same fields, so that a null is a field which an object doesn't have.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _text_of_part(place: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise DataError(
            f"{place} has a part of type {kind!r}; expected text parts alone, "
            '{"type": "text", "text": "..."}: remove it, or the row'
        )
    return text


def _object(place: str, column: str, value: Any, expected: str) -> dict[str, Any]:
    """Return an object, or the one that a text is the JSON of."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            advice = _of_python(column) if _PYTHON_OBJECT.fullmatch(value) else expected
            raise DataError(
                f"{place}: {column} is the text {value!r:.80}, which isn't the JSON of an object; {advice}"
            ) from None
    if not isinstance(found, dict):
        raise DataError(f"{place}: {column} is {value!r:.80}, of type {type(found).__name__}; {expected}")
    return found


def _json(place: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise DataError(
            f"{place} has NaN or an infinite number; write null, a text, or a number, or remove the row"
        ) from None


def _require_utf8(place: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} has the lone surrogate {text[error.start]!a}, which UTF-8 can't have; remove it, or write the "
            "whole character"
        ) from None
