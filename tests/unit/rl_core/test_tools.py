"""Tools as an environment: loading, schemas, argument checks, and what the model is told."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from infra.environments.child import MAX_MESSAGES, read_step
from rl_core.environments.base import Environment, Step
from rl_core.environments.tools import METRICS, ToolEnvironment, load_tools, tool_schemas
from schemas.errors import ConfigError, EnvironmentImportError

SAMPLES = "tests.unit.rl_core.sample_tools"


def environment(*names: str, parser: str = "hermes") -> ToolEnvironment:
    task = {"prompt": [], "answer": "", "info": {}}
    return ToolEnvironment(task, 3, tools=[f"{SAMPLES}:{name}" for name in names], parser=parser)


def turn(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "I call: " + "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def counts(**metrics: float) -> dict[str, float]:
    return {**dict.fromkeys(METRICS, 0.0), **metrics}


def answer(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Return the message for one call, and the metrics that are not 0."""
    step = asyncio.run(environment(name).step(turn((name, arguments))))
    assert (step.reward, step.done) == (0.0, False)
    [message] = step.observation
    return message, {metric: value for metric, value in step.metrics.items() if value}


def test_it_has_the_shape_of_an_environment() -> None:
    made: Environment = environment("add")
    assert made.role == "tool"
    assert made.reset() is None


def test_calls_are_answered_in_order() -> None:
    action = turn(("add", {"a": 1, "b": 2}), ("fetch", {"key": "x"}), ("now", {}), ("later", {"key": "y"}))
    step = asyncio.run(environment("add", "fetch", "now", "later").step(action))
    expected = [
        "3",
        '{"key": "x", "at": "2026-01-02", "é": null}',
        "noon",
        '{"key": "y", "at": "2026-01-02", "é": null}',
    ]
    assert step == Step(expected, 0.0, False, counts(tool_calls=4))


@pytest.mark.parametrize("text", ["It is 3.", "", "<|think|>"])
@pytest.mark.parametrize("parser", ["hermes", "json"])
def test_a_turn_without_a_call_ends_the_trajectory(text: str, parser: str) -> None:
    assert asyncio.run(environment("add", parser=parser).step(text)) == Step("", 0.0, True)


@pytest.mark.parametrize(("num_calls", "num_run"), [(64, 64), (65, 63), (300, 63)])
def test_a_turn_has_at_most_as_many_messages_as_its_process_takes(num_calls: int, num_run: int) -> None:
    step = asyncio.run(environment("add").step(turn(*[("add", {"a": 1})] * num_calls)))
    left = num_calls - num_run
    last = f"{left} more calls were not run. Write at most 64 in a turn"
    assert step.observation == ["2"] * num_run + [last] * (left > 0)
    assert step.metrics == counts(tool_calls=num_calls, malformed_calls=left)
    assert len(read_step(step, 10_000)["observations"]) <= MAX_MESSAGES


def test_parameters_named_task_and_seed_are_the_models() -> None:
    assert answer("echo", {"task": "ab", "seed": 2})[0] == "abab"
    message, _ = answer("echo", {})
    assert message == 'echo: "task" is missing, "seed" is missing. Its arguments are {"task": string, "seed": integer}'


def test_one_bad_call_does_not_keep_others_from_running() -> None:
    action = "<tool_call>add(1)</tool_call>" + turn(("sub", {}), ("add", {"x": 1}), ("fail", {"how": "raise"}))
    step = asyncio.run(environment("add", "fail").step(action + turn(("add", {"a": 2}))))
    malformed, unknown, wrong, raised, right = step.observation
    assert malformed.startswith("The call is malformed: Expecting value")
    assert unknown == "There is no tool 'sub'. The tools are add, fail"
    assert wrong.startswith(
        'add: "a" is missing, "x" is unknown. Its arguments are {"a": integer, "b": integer (optional)}'
    )
    assert raised == "fail raised KeyError: 'nothing'"
    assert right == "3"
    assert step.metrics == counts(tool_calls=5, malformed_calls=2, unknown_tools=1, tool_errors=1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "fail raised SystemExit: bye"),
        ("stop", "fail raised RuntimeError: StopIteration: "),
        ("long", "fail raised ValueError: " + "x" * (1000 - len("ValueError: "))),
        ("unprintable", "fail raised Unprintable, whose message can't be formatted"),
        ("circular", "fail raised ValueError: Circular reference detected"),
        ("object", "fail raised TypeError: the result has a generator, expected text or what JSON has"),
    ],
)
def test_whatever_a_tool_raises_is_a_message(how: str, message: str) -> None:
    assert answer("fail", {"how": how}) == (message, {"tool_calls": 1.0, "tool_errors": 1.0})


def test_a_message_can_be_sent_as_utf8() -> None:
    assert answer("fail", {"how": "surrogate"})[0] == "?"


def test_plain_functions_of_several_trajectories_run_together() -> None:
    async def both() -> list[Step]:
        return await asyncio.gather(*(environment("meet").step(turn(("meet", {}))) for _ in range(2)))

    assert [list(step.observation) for step in asyncio.run(both())] == [["met"], ["met"]]  # else they wait forever


RIGHT: dict[str, Any] = {
    "text": "a", "number": 1.5, "flag": True, "items": [1, 2], "table": {"x": 1, "y": 0.5}, "unit": "C", "either": None,
    "old": "b", "anything": [None], "bare": [1, "a"], "open": {"x": []}, "noted": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {}, {"text": ""}, {"number": 1}, {"number": 10**400}, {"flag": False}, {"items": []}, {"table": {}},
        {"unit": 1}, {"either": 3}, {"old": None}, {"anything": None},
    ],
)  # fmt: skip
def test_arguments_of_the_right_types_are_taken(other: dict[str, Any]) -> None:
    assert answer("typed", RIGHT | other) == ("taken", {"tool_calls": 1.0})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("text", 1, "must be string, not integer"),
        ("text", None, "must be string, not null"),
        ("number", "1.5", "must be number, not string"),
        ("number", True, "must be number, not boolean"),
        ("flag", 1, "must be boolean, not integer"),
        ("items", [1, "2"], "must be array of integer"),
        ("items", [True], "must be array of integer"),
        ("items", "12", "must be array of integer, not string"),
        ("table", {"x": "y"}, "must be object of number"),
        ("table", [], "must be object of number, not array"),
        ("unit", "K", 'must be one of ["C", "F", 1], not string'),
        ("unit", True, 'must be one of ["C", "F", 1], not boolean'),
        ("either", 1.5, "must be integer or null, not number"),
        ("old", 0, "must be string or null, not integer"),
        ("bare", {}, "must be array, not object"),
        ("open", [], "must be object, not array"),
        ("noted", 1.0, "must be integer, not number"),
    ],
)
def test_arguments_of_other_types_are_refused(name: str, value: object, problem: str) -> None:
    message, metrics = answer("typed", RIGHT | {name: value})
    assert message.startswith(f'typed: "{name}" {problem}. Its arguments are {{"text": string, "number": number, ')
    assert metrics == {"tool_calls": 1.0, "malformed_calls": 1.0}


def test_what_the_model_wrote_is_not_repeated_at_length() -> None:
    assert len(answer("now", {f"x{number}": 1 for number in range(1000)})[0]) < 400
    step = asyncio.run(environment("now").step(turn(("x" * 10_000, {}))))
    assert len(step.observation[0]) < 200


def test_tools_have_the_names_in_their_paths() -> None:
    tools = load_tools([f"{SAMPLES}:plus", f"{SAMPLES}:now"])
    assert [(name, tool.name) for name, tool in tools.items()] == [("plus", "plus"), ("now", "now")]
    assert tools["plus"].check({"a": 1}) is None
    assert [schema["function"]["name"] for schema in tool_schemas([f"{SAMPLES}:plus", f"{SAMPLES}:now"])] == [
        "plus",
        "now",
    ]


def test_schemas_are_those_of_transformers() -> None:
    names = ["add", "fetch", "later", "echo", "now", "fail", "typed", "meet"]
    paths = [f"{SAMPLES}:{name}" for name in names]
    schemas = tool_schemas(paths)
    assert schemas == [get_json_schema(tool.function) for tool in load_tools(paths).values()]
    parameters = schemas[0]["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["b"]["description"] == "The second one, which may be left out."


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_tools:add", "importing 'no_such_tools' raised ModuleNotFoundError"),
        (f"{SAMPLES}:missing", "there is no function 'missing'"),
        (SAMPLES, "there is no function ''"),
        ("sys:missing", "in sys, there is no function 'missing'"),
        (f"{SAMPLES}:meetings", "'meetings' is not a function"),
        ("datetime:date", "'date' is not a function"),
    ],
)
def test_what_is_no_function_is_refused(path: str, text: str) -> None:
    with pytest.raises(EnvironmentImportError, match=text) as raised:
        load_tools([path])
    assert f"environment.tools {path!r}: " in str(raised.value)


@pytest.fixture
def load_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    def load(source: str, module: str = "my_tools") -> list[dict[str, Any]]:
        (tmp_path / f"{module}.py").write_text(f"from typing import Literal\n{source}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return tool_schemas([f"{module}:tool"])

    return load


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        ("a", "parameter 'a' has no type hint; add one, such as `a: str`"),
        ("a: int, b: int", "parameter 'b' is not in the docstring; describe it as `b: ...` under `Args:`"),
        ("*a: int", "parameter '*a: int' can't be given by name"),
        ("**a: int", "parameter '**a: int' can't be given by name"),
        ("a: int, /", "parameter 'a: int' can't be given by name"),
        ("a: bytes", "parameter 'a': <class 'bytes'> is no type of JSON's values"),
        ("a: tuple[int, int]", "parameter 'a': tuple[int, int] is no type of JSON's values"),
        ("a: list[bytes] | None", "parameter 'a': <class 'bytes'> is no type of JSON's values"),
        ("a: dict[int, str]", "parameter 'a': dict[int, str] keys must be strings"),
        ("a: Literal[b'x']", "parameter 'a': Object of type bytes is not JSON serializable"),
        ("a: 'Missing'", "name 'Missing' is not defined"),
    ],
)
def test_parameters_must_be_typed_described_and_json(load_source, signature: str, text: str) -> None:
    docstring = "Do.\n\n    Args:\n        a: A number.\n    "
    with pytest.raises(EnvironmentImportError, match=re.escape(f"environment.tools 'my_tools:tool': {text}")):
        load_source(f'def tool({signature}):\n    """{docstring}"""\n')


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        ("", "it has no docstring"),
        ("Do.", "parameter 'a' is not in the docstring"),
        ("Do.\n\nArgs:\n    a (int): A number.", "parameter 'a' is not in the docstring"),
        ("Do.\n\nArgs:\n    a:", "parameter 'a' is not in the docstring"),
        ("Do.\n\nReturns:\n    a: A number.", "parameter 'a' is not in the docstring"),
        ("Do.\n\n:param a: A number.", "parameter 'a' is not in the docstring"),
        ("Do.\n\nArgs:\n    a: A text (choices: one, two)", "transformers can't make a JSON schema of it"),
    ],
)
def test_docstrings_must_be_those_that_transformers_reads(load_source, docstring: str, text: str) -> None:
    with pytest.raises(EnvironmentImportError, match=f"environment.tools 'my_tools:tool': {text}"):
        load_source(f"def tool(a: str):\n    {docstring!r}\n")


def test_a_module_that_raises_is_named(load_source) -> None:
    with pytest.raises(EnvironmentImportError, match="importing 'raising_tools' raised ZeroDivisionError"):
        load_source("1 / 0", "raising_tools")


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(EnvironmentImportError, match="two are named 'add'"):
        load_tools([f"{SAMPLES}:add", f"{SAMPLES}:add"])


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.parser is 'xml'; expected one of hermes, json"):
        environment("add", parser="xml")


def test_an_environment_process_imports_little() -> None:
    code = """
import asyncio, sys
from rl_core.environments.tools import ToolEnvironment
tools = ["infra.integrations.python_tool:python"]
environment = ToolEnvironment({}, 0, tools=tools, parser="json")
asyncio.run(environment.step('{"name": "python", "arguments": {"code": ""}}'))
packages = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - before
print(*sorted(packages))
"""
    code = "import sys; before = {name.partition('.')[0] for name in sys.modules}" + code
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["infra", "rl_core", "schemas"]  # of infra, its variables only
