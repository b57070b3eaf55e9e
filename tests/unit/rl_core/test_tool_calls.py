"""Parsing of tool calls: both forms, what counts as an answer, and that no text makes a parser fail."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.calls import PARSERS, Call, MalformedCall, parse_hermes, parse_json

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADDED = Call("add", {"a": 1, "b": 2})


def tagged(*bodies: str) -> str:
    return "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def reason(text: str, parser: str = "hermes") -> str:
    [call] = PARSERS[parser](text)
    assert isinstance(call, MalformedCall)
    return call.reason


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 3.", []),
        ("", []),
        (ADD, []),  # no tags
        ("</tool_call>", []),
        (tagged(ADD), [ADDED]),
        ("I add them.\n" + tagged(f"\n{ADD}\n") + "\nThen I see.", [ADDED]),
        (tagged(ADD, '{"name": "now", "arguments": {}}'), [ADDED, Call("now", {})]),
        (f"<think>\nI could write {tagged('...')}.\n</think>\n{tagged(ADD)}", [ADDED]),
        (f"I could write {tagged(ADD)}, but I know it.</think>It is 3.", []),
    ],
)
def test_hermes_calls_are_between_tags(text: str, calls: list[Call]) -> None:
    assert parse_hermes(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 3.", []),
        ("", []),
        (f"I add them: {ADD}", []),
        (f"[{ADD}]", []),
        ('{"sum": 3}', []),
        ('{"name": "Ada"}', []),
        ('```json\n{"sum": 3}\n```', []),
        (f"\n {ADD} \n", [ADDED]),
        (f"```json\n{ADD}\n```", [ADDED]),
        (f"```\n{ADD}```\n", [ADDED]),
        (f"<think>add {{</think>\n{ADD}", [ADDED]),
    ],
)
def test_a_json_call_is_the_whole_turn(text: str, calls: list[Call]) -> None:
    assert parse_json(text) == calls


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        json.dumps({"name": "add", "arguments": '{"a": 1, "b": 2}'}),
        '{"id": 7, "type": "function", "name": "add", "arguments": {"a": 1, "b": 2}}',
    ],
)
def test_arguments_may_have_another_name_or_be_a_string(parser: str, body: str) -> None:
    assert PARSERS[parser](body if parser == "json" else tagged(body)) == [ADDED]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "delimiter"),
        (f"{ADD} {ADD}", "Extra data"),
        ("{'name': 'add', 'arguments': {}}", "double quotes"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a JSON value"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is not a JSON value"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "a number is too large"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("9" * 5000), "a number has more than 1000 digits"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "same key twice"),
        ('{"name": "add", "arguments": {"a": "two\nlines"}}', "Invalid control character"),
        ('{"name": "add", "arguments": {"a": "\0"}}', "Invalid control character"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("[" * 100_000 + "]" * 100_000), "nested too deeply"),
        ('{"name": "add", "arguments": [1, 2]}', '"arguments" must be a JSON object'),
        ('{"name": "add", "parameters": null}', '"parameters" must be a JSON object'),
        ('{"name": "add", "arguments": "a = 1"}', "Expecting value"),
        ('{"name": "add", "arguments": {}, "parameters": {}}', 'both "arguments" and "parameters"'),
        ('{"name": 3, "arguments": {}}', '"name" must be the name of a tool'),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_how_calls_are_written(parser: str, body: str, text: str) -> None:
    told = reason(body if parser == "json" else tagged(body), parser)
    assert text in told
    assert '{"name": "...", "arguments": {...}}' in told
    assert len(told) < 250


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "Expecting value"),
        ("[]", "not a JSON object"),
        ('"add"', "not a JSON object"),
        ('{"name": "a"}', "is missing"),
    ],
)
def test_tags_must_hold_a_call(body: str, text: str) -> None:
    assert text in reason(tagged(body))


def test_an_unclosed_call_is_malformed_and_the_others_are_not() -> None:
    first, second = parse_hermes(f"{tagged(ADD)}<tool_call>{ADD}")
    assert first == ADDED
    assert isinstance(second, MalformedCall)
    assert "no </tool_call>" in second.reason


PIECES = [
    "<tool_call>", "</tool_call>", "</think>", "```json\n", "```", ADD, '{"name": "a", "arguments": ', "{", "}", "[",
    '"', "\\ud8", "NaN", "1e999", "\0", "\n", ":", ",", "\ud800", "\N{GRINNING FACE}",
]  # fmt: skip
VALUES = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.text()) | st.just("\ud800")
OBJECTS = st.dictionaries(st.sampled_from(["name", "arguments", "parameters", "other"]), VALUES).map(json.dumps)


@pytest.mark.parametrize("parser", PARSERS)
@given(text=st.text() | st.lists(st.sampled_from(PIECES) | st.text()).map("".join) | OBJECTS | OBJECTS.map(tagged))
def test_any_text_has_a_result(parser: str, text: str) -> None:
    for call in PARSERS[parser](text):
        if isinstance(call, Call):
            json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
        else:
            assert call.reason


MARKS = st.sampled_from(["</think>", "</tool_call>", "<tool_call>{", "<think>", '"', "```"])
TEXTS = st.text() | st.lists(MARKS | st.text(max_size=3)).map("".join)


@given(TEXTS, st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans() | st.lists(TEXTS)))
def test_any_call_written_as_json_is_read_back(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    call = Call(name, arguments)
    for before in ("", f"I could write {tagged(text)}.</think>"):
        assert parse_json(f"{before}{text}") == [call]
        assert parse_json(f"{before}\n```json\n{text}\n```") == [call]
        assert parse_hermes(f"{before}Now: {tagged(text, text)}") == [call, call]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_malformed_call_may_have_marks_in_its_texts(parser: str) -> None:
    body = '{"name": "add", "arguments": {"a": "</think></tool_call>"}'
    assert "delimiter" in reason(body if parser == "json" else f"Now: {tagged(body)}", parser)
    assert [type(call) for call in parse_hermes(f"{tagged(body)}{tagged(ADD)}")] == [MalformedCall, Call]
