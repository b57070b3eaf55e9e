"""Tools as an environment: the functions that a model calls are run, and their results are its next messages.

Environment processes import this module, so it imports little: neither transformers and torch, nor pydantic.
"""

import asyncio
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rl_core.environments.base import Step, Task
from rl_core.environments.calls import PARSERS, Call, MalformedCall
from rl_core.user_code import describe_error, import_user_module
from schemas.errors import ConfigError, EnvironmentImportError

METRICS = ("tool_calls", "tool_errors", "malformed_calls", "unknown_tools")
MAX_MESSAGES = 64  # that answer a turn; an environment process takes no more
MAX_PROBLEM_CHARACTERS = 300  # of what is wrong with a call's arguments

# Those of `transformers.utils.get_json_schema`, which reads a description of each parameter from the docstring.
_ARGS = re.compile(r"\n\s*Args:\n\s*(.*?)[\n\s]*(?:Returns:|Raises:|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"(?:^|\n)\s*(\w+):\s*(.*?)\s*(?=\n\s*\w+:|\Z)", re.DOTALL)


class Kind(NamedTuple):
    """The JSON values that a type hint allows."""

    name: str
    allows: Callable[[object], bool]


_KINDS = {
    Any: Kind("anything", lambda value: True),
    str: Kind("string", lambda value: isinstance(value, str)),
    int: Kind("integer", lambda value: type(value) is int),  # a bool is an int
    float: Kind("number", lambda value: type(value) in (int, float)),
    bool: Kind("boolean", lambda value: isinstance(value, bool)),
    types.NoneType: Kind("null", lambda value: value is None),
    list: Kind("array", lambda value: isinstance(value, list)),
    dict: Kind("object", lambda value: isinstance(value, dict)),
}


class ToolParameter(NamedTuple):
    """A parameter of a tool."""

    kind: Kind
    is_required: bool


@dataclass(frozen=True)
class Tool:
    """A function that the model may call by its name."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, ToolParameter]

    @property
    def usage(self) -> str:
        """The arguments that it takes, for the model."""
        parts = [
            f'"{name}": {kind.name}' + ("" if is_required else " (optional)")
            for name, (kind, is_required) in self.parameters.items()
        ]
        return "{" + ", ".join(parts) + "}"

    def check(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what is wrong with a call's arguments, and which are right, for the model; None: nothing is."""
        required = [name for name, parameter in self.parameters.items() if parameter.is_required]
        problems = [f'"{name}" is missing' for name in required if name not in arguments]
        for name, value in arguments.items():
            if name not in self.parameters:
                problems.append(f'"{name}" is unknown')
            elif not (kind := self.parameters[name].kind).allows(value):
                given = _KINDS[type(value)].name
                other = "" if kind.name.startswith(given) else f", not {given}"  # else an item is wrong
                problems.append(f'"{name}" must be {kind.name}{other}')
        if not problems:
            return None
        return f"{self.name}: {', '.join(problems)[:MAX_PROBLEM_CHARACTERS]}. Its arguments are {self.usage}"


class ToolEnvironment:
    """Runs the calls in a turn in order, and answers each with a message; a turn without a call ends the trajectory.

    A plain function runs in a thread, so that it doesn't keep other trajectories waiting.

    Args:
        task: The data row; tools don't see it.
        seed: The environment's seed; tools don't see it.
        tools: Import paths of the functions.
        parser: How calls are written, a key of `PARSERS`.

    Raises:
        ConfigError: There is no such parser.
        EnvironmentImportError: A tool can't be found, or lacks what it needs.
    """

    role = "tool"
    keeps_state = False

    def __init__(self, task: Task, seed: int, *, tools: Sequence[str], parser: str) -> None:
        if parser not in PARSERS:
            raise ConfigError(f"environment.parser is {parser!r}; expected one of {', '.join(PARSERS)}")
        self._parse, self._tools = PARSERS[parser], load_tools(tools)

    def reset(self) -> None:
        """Begin; the data row's prompt is all that the model gets."""

    async def step(self, action: str) -> Step:
        """Run the calls of a turn; the metrics count all of them, and those that failed by their failure.

        Of more than `MAX_MESSAGES`, as a model writes them that repeats itself, the last ones share one message.
        """
        calls = self._parse(action)
        if not calls:
            return Step("", 0.0, True)
        metrics, messages = dict.fromkeys(METRICS, 0.0), []
        num_run = len(calls) if len(calls) <= MAX_MESSAGES else MAX_MESSAGES - 1
        for call in calls[:num_run]:
            message, failure = await self._answer(call)
            messages.append(message.encode(errors="replace").decode())  # without what can't be UTF-8
            metrics["tool_calls"] += 1
            if failure:
                metrics[failure] += 1
        if num_left := len(calls) - num_run:
            messages.append(f"{num_left} more calls were not run. Write at most {MAX_MESSAGES} in a turn")
            metrics["tool_calls"] += num_left
            metrics["malformed_calls"] += num_left
        return Step(messages, 0.0, False, metrics)

    async def _answer(self, call: Call | MalformedCall) -> tuple[str, str | None]:
        """Return the message that answers a call, and the metric that counts its failure."""
        if isinstance(call, MalformedCall):
            return call.reason, "malformed_calls"
        if (tool := self._tools.get(call.name)) is None:
            return f"There is no tool {call.name[:100]!r}. The tools are {', '.join(self._tools)}", "unknown_tools"
        if problem := tool.check(call.arguments):
            return problem, "malformed_calls"
        try:
            if inspect.iscoroutinefunction(tool.function):
                result = await tool.function(**call.arguments)
            else:
                result = await asyncio.to_thread(_run, tool.function, call.arguments)
                if inspect.isawaitable(result):
                    result = await result
            return result if isinstance(result, str) else json.dumps(result, default=_as_text, ensure_ascii=False), None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            return f"{tool.name} raised {describe_error(error)}", "tool_errors"


def _as_text(value: object) -> str:
    """Return the text of a part of a result that JSON lacks, such as a date; refuse one that is an address."""
    if re.search(r" at 0x[0-9a-f]+>", text := str(value)):
        raise TypeError(f"the result has a {type(value).__name__}, expected text or what JSON has")
    return text


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """Return the functions by their names, those after the colons.

    Args:
        paths: Import paths, `module:function`.

    Raises:
        EnvironmentImportError: One can't be imported or is no function, a parameter has no type hint of JSON's types
            or no description in the docstring, or can't be given by its name, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for path in paths:
        tool = _load(path)
        if tool.name in tools:
            raise EnvironmentImportError(
                f"environment.tools: two are named {tool.name!r}; rename one: the model calls them by name"
            )
        tools[tool.name] = tool
    return tools


def tool_schemas(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the functions' JSON schemas, as chat templates expect them under `tools`.

    Args:
        paths: Import paths, `module:function`.

    Raises:
        EnvironmentImportError: See `load_tools`; or transformers can't make a schema of one.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    schemas: list[dict[str, Any]] = []
    for path, tool in zip(paths, load_tools(paths).values(), strict=True):
        try:
            schema = get_json_schema(tool.function)
        except Exception as error:
            raise EnvironmentImportError(
                f"environment.tools {path!r}: transformers can't make a JSON schema of it: {error}; "
                "change its type hints or its docstring"
            ) from error
        schemas.append({**schema, "function": {**schema["function"], "name": tool.name}})
    return schemas


@cache  # an environment is made for each trajectory
def _load(path: str) -> Tool:
    module, name = import_user_module("environment.tools", path, EnvironmentImportError)
    where = f"environment.tools {path!r}"
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        file = getattr(module, "__file__", None) or module.__name__
        found = f"{name!r} is not a function" if hasattr(module, name) else f"there is no function {name!r}"
        raise EnvironmentImportError(f"{where}: in {file}, {found}; define it there with `def` or `async def`")
    try:
        return Tool(name, function, _parameters(function))
    except Exception as error:  # evaluating a type hint may raise anything
        raise EnvironmentImportError(f"{where}: {error}") from error


def _parameters(function: Callable[..., Any]) -> dict[str, ToolParameter]:
    """Return a function's parameters; raises a `TypeError` that says what they lack."""
    if not (text := (inspect.getdoc(function) or "").strip()):
        raise TypeError("it has no docstring; the model learns from it what the tool does")
    section = _ARGS.search(text)
    described = {name for name, description in _ARGUMENT.findall(section[1] if section else "") if description}
    hints, parameters = get_type_hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter {str(parameter)!r} can't be given by name; replace it by named ones")
        if name not in hints:
            raise TypeError(f"parameter {name!r} has no type hint; add one, such as `{name}: str`")
        if name not in described:
            raise TypeError(f"parameter {name!r} is not in the docstring; describe it as `{name}: ...` under `Args:`")
        try:
            kind = _kind(hints[name])
        except TypeError as error:
            raise TypeError(f"parameter {name!r}: {error}") from error
        parameters[name] = ToolParameter(kind, parameter.default is parameter.empty)
    return parameters


def _kind(hint: Any) -> Kind:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None or not inner:
        if (kind := _KINDS.get(origin or hint)) is None:
            raise TypeError(f"{hint!r} is no type of JSON's values; use str, int, float, bool, list, dict or Literal")
        return kind
    if origin is Literal:
        values = [(type(value), value) for value in inner]  # 1 == True
        return Kind(f"one of {json.dumps(inner, ensure_ascii=False)}", lambda value: (type(value), value) in values)
    if origin is dict and inner[0] is not str:
        raise TypeError(f"{hint!r} keys must be strings; use `dict[str, ...]`")
    if origin not in (Union, types.UnionType, list, dict):
        raise TypeError(f"{hint!r} is no type of JSON's values; use `list[...]` or `dict[str, ...]`")
    kinds = [_kind(part) for part in inner]
    last = kinds[-1]
    if origin is list:
        return Kind(f"array of {last.name}", lambda value: isinstance(value, list) and all(map(last.allows, value)))
    if origin is dict:
        return Kind(
            f"object of {last.name}", lambda value: isinstance(value, dict) and all(map(last.allows, value.values()))
        )
    return Kind(" or ".join(kind.name for kind in kinds), lambda value: any(kind.allows(value) for kind in kinds))


def _run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # asyncio can't pass it on, and would wait forever
        raise RuntimeError(f"StopIteration: {error}") from error
