"""The program of an environment process: makes and steps environments as its parent asks.

It and the modules of Sluice that it imports need the standard library only, because it also runs in interpreters
without Sluice. Messages are JSON: first the settings, answered by `{"ready": true, "is_disposable": bool}` or an error
(`infra.processes.calls.Parent`); then requests with an environment's `number`, answered in any order. A request makes
the environment if it has a `make`, and then takes its `action`, if any; or, with `close`, it forgets the environment.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from numbers import Real
from operator import methodcaller
from types import ModuleType
from typing import Any

from infra.processes.calls import Call, CallError, Parent, describe
from infra.processes.threads import ThreadPerCall
from rl_core.user_code import outside_of_loop

MAX_MESSAGES = 64  # of one observation
OF_OBSERVATIONS = ("observations", "roles", "extras", "tools", "after", "sampling")  # of replies: what is asked
OF_MESSAGES = ("name", "tool_calls", "tool_call_id")  # what they may have besides role and content
RESULT = "return (observation, reward, done), or Step(observation, reward, done, metrics)"


class LoadError(Exception):
    """The class can't be imported, or is none of an environment."""


class PackageFinder(MetaPathFinder):
    """Finds one package by its folder, so that nothing else in the folder around it can be imported."""

    def __init__(self, name: str, folder: str) -> None:
        self._name, self._folder = name, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        file = os.path.join(self._folder, "__init__.py")
        return spec_from_file_location(fullname, file, submodule_search_locations=[self._folder])


def find_modules(module_path: Sequence[str | None], packages: Mapping[str, str]) -> None:
    """Set where modules are found.

    Args:
        module_path: The folders, for `sys.path`; None stands for this interpreter's own.
        packages: Folders of packages by name: the last one is found after others of its name, the rest before them.
    """
    own = sys.path[:]
    sys.path[:] = [folder for entry in module_path for folder in (own if entry is None else [entry])]
    finders = [PackageFinder(name, folder) for name, folder in packages.items()]
    sys.meta_path[:] = [*finders[:-1], *sys.meta_path, *finders[-1:]]


def load(path: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Return the class at an import path.

    Raises:
        LoadError: It isn't there, or is no class of environments that take these arguments.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a user's module may raise anything
        raise LoadError(
            f"environment.path {path!r}: importing {module_name!r} raised {describe(error)}; "
            "is the module's folder the current one, or on PYTHONPATH, and is what it imports installed for "
            f"{sys.executable}?"
        ) from error
    file = getattr(module, "__file__", None) or module_name
    found = getattr(module, name, None)
    if not isinstance(found, type):
        what = "is not a class" if hasattr(module, name) else "is not there"
        raise LoadError(
            f"environment.path {path!r}: {name!r} {what} in {file}; define `class {name}` there, "
            "with `reset(self)` and `step(self, action)`"
        )
    for method in ("reset(self)", "step(self, action)"):
        if not callable(getattr(found, method.partition("(")[0], None)):
            raise LoadError(f"environment.path {path!r}: class {name} of {file} has no `{method}`; define it")
    try:
        inspect.signature(found).bind({}, 0, **arguments)
    except TypeError as error:
        raise LoadError(
            f"environment.path {path!r}: class {name} of {file} can't be called with (task, seed) and "
            f"environment.arguments {sorted(arguments)}: {error}; change its `__init__(self, task, seed, ...)` or them"
        ) from error
    except ValueError:  # of a class without a signature, such as a compiled one: its first call will show
        pass
    return found


def main(connection: int, memory: int) -> None:
    """Serve the parent at the other end of a socket until it closes.

    Args:
        connection: The socket's descriptor.
        memory: The descriptor of the memory in which the parent sees what this process does.
    """
    parent = Parent(connection, memory)
    os.dup2(2, 1)  # what the user's code prints
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(_serve(parent))


async def _serve(parent: Parent) -> None:
    messages = parent.messages()
    settings = json.loads(await anext(messages))
    try:
        with outside_of_loop():
            find_modules(settings["module_path"], settings["packages"])
            environment_class = load(settings["path"], settings["arguments"])
    except LoadError as error:
        await parent.refuse("EnvironmentImportError", str(error))
        return
    is_disposable = not (_keeps_state(environment_class) or hasattr(environment_class, "close"))
    parent.answer(ready=True, is_disposable=is_disposable)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(threads := ThreadPerCall(loop))
    await Server(settings, environment_class, parent, threads).serve(messages)


class Server:
    """The environments of one process.

    Args:
        settings: The parent's first message.
        environment_class: Makes environments.
        parent: Takes the answers, and sees whose code is running.
        threads: Run the environments' plain code, if it asks for a thread.
    """

    def __init__(
        self, settings: dict[str, Any], environment_class: Callable[..., Any], parent: Parent, threads: ThreadPerCall
    ) -> None:
        self._settings, self._class, self._parent, self._threads = settings, environment_class, parent, threads
        self._environments: dict[int, Any] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}  # the latest one of each environment, if it runs

    async def serve(self, messages: AsyncIterator[bytes]) -> None:
        """Begin each request as soon as it arrives and no other code runs, until the parent is gone."""
        async for message in messages:
            request = json.loads(message)
            number = request["number"]
            if "close" in request:
                if number in self._calls:
                    self._calls[number].cancel()
                work = self._close_for_good(number)
            else:
                work = self._answer(**request)
            self._calls[number] = task = asyncio.create_task(work)
            task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: "asyncio.Task[None]") -> None:
        if self._calls.get(number) is task:
            del self._calls[number]
        if not task.cancelled() and (error := task.exception()) is not None:  # not the user's, whose are answers
            traceback.print_exception(error)
            os._exit(os.EX_SOFTWARE)

    async def _close_for_good(self, number: int) -> None:
        await self._close(number)
        self._parent.answer(number=number, closed=1, num_hung_threads=self._threads.num_hung)

    async def _answer(
        self, number: int, seconds: float, make: dict[str, Any] | None = None, action: str | None = None
    ) -> None:
        """Make the environment, or let it take an action in `seconds`, and answer."""
        call = Call(self._parent.state, number, 0.0)
        try:
            if make is not None:
                await self._close(number)
            if make is not None and action is not None:
                try:
                    await self._make_again(number, **make)
                except CallError as error:
                    kind = "late" if error.kind == "timeout" else "differs" if make["is_recorded"] else error.kind
                    raise CallError(kind, str(error)) from None
            with Call(self._parent.state, number, seconds) as call:
                if make is not None and action is None:
                    await self._make(call, number, make["task"], make["seed"])
                reply = await self._ask(call, number, action)
        except CallError as error:
            reply = {"kind": error.kind, "failure": await self._describe(number, error)}
        if requests := self._take_request_counts(number):
            reply["requests"] = requests
        self._parent.answer(number=number, seconds=call.seconds, num_hung_threads=self._threads.num_hung, **reply)

    async def _describe(self, number: int, error: CallError) -> str:
        """Return a failure's message; of a timeout, with what the environment says of it in `describe_timeout`."""
        describe = getattr(self._environments.get(number), "describe_timeout", None)
        if error.kind != "timeout" or describe is None:
            return str(error)
        with Call(self._parent.state, number, self._settings["step_seconds"]) as call, suppress(CallError):
            return f"{error}; {await call.run(describe)}"
        return str(error)

    async def _make(self, call: Call, number: int, task: dict[str, Any], seed: int) -> None:
        arguments = self._settings["arguments"]
        self._environments[number] = await call.run(lambda: self._class(task, seed, **arguments))

    async def _ask(self, call: Call, number: int, action: str | None) -> dict[str, Any]:
        """Have an environment take an action, or reset it, and return its reply, in JSON's types."""
        environment, limit = self._environments[number], self._settings["max_observation_characters"]
        if hasattr(environment, "note_limit"):
            environment.note_limit(lambda: call.seconds_left)
        result = await call.run(methodcaller("reset") if action is None else methodcaller("step", action), environment)
        reply: dict[str, Any] = await call.run(read_message if action is None else read_step, result, limit)
        return reply | {"role": await call.run(read_role, environment)}

    async def _make_again(
        self, number: int, task: dict[str, Any], seed: int, history: list[str], expected: list[Any], is_recorded: bool
    ) -> None:
        """Make an environment; if it keeps state, reset it and have it take earlier actions.

        If it answers otherwise than `expected`, the replies to the reset and the actions, the `CallError` is `differs`.
        """
        with Call(self._parent.state, number, self._settings["reset_seconds"], is_remade=True) as call:
            await self._make(call, number, task, seed)
        for at, action in enumerate([None, *history] if _keeps_state(self._class) else []):
            limit = self._settings["reset_seconds" if action is None else "step_seconds"]
            if hasattr(environment := self._environments[number], "expect"):
                environment.expect(partial(self._is_expected, expected[at], is_reset=action is None))
            with Call(self._parent.state, number, limit, is_remade=True) as call:
                reply = await self._ask(call, number, action)
                if reply != expected[at]:
                    raise CallError("differs", f"its answer {at} is {reply!r:.200}, but was {expected[at]!r:.200}")
        self._take_request_counts(number)  # they were counted when they first came

    def _take_request_counts(self, number: int) -> dict[str, float]:
        """Return what an environment that asks its model itself has counted since the last call; else nothing."""
        environment = self._environments.get(number)
        take: Callable[[Any], dict[str, float]] | None = getattr(type(environment), "take_request_counts", None)
        return take(environment) if take is not None else {}

    def _is_expected(self, expected: dict[str, Any], observation: object, role: str, *, is_reset: bool) -> bool:
        """Return whether an environment has this observation again, whose messages have this role."""
        limit = self._settings["max_observation_characters"]
        try:
            found = (read_message if is_reset else read_next)(observation, limit)
        except CallError:
            return False
        return role == expected["role"] and all(found.get(name) == expected.get(name) for name in OF_OBSERVATIONS)

    async def _close(self, number: int) -> None:
        environment = self._environments.pop(number, None)
        try:
            with Call(self._parent.state, number, self._settings["step_seconds"]) as call:
                await call.run(lambda: environment.close() if hasattr(environment, "close") else None)
        except CallError as error:
            self._parent.answer(warning=f"close() of an environment failed: {error}")


def _keeps_state(environment_class: Callable[..., Any]) -> bool:
    return bool(getattr(environment_class, "keeps_state", True))


def read_message(result: object, max_characters: int) -> dict[str, Any]:
    """Return what `reset` returned, in JSON's types; None is no message, and a chat has the roles of its messages."""
    if isinstance(result, Mapping):
        return read_chat("reset", result)
    return {"observations": [] if result is None else read_observation("reset", result, max_characters)}


def read_chat(method: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat that `reset` or `step` returned, whose length is limited in tokens.

    Args:
        method: Which of them.
        result: What it returned: the messages, and perhaps the tools that the model may call.

    Raises:
        CallError: A message is no dict of `role` and `content`, or its content can't be encoded; or the tools aren't
            JSON.
    """
    messages = result.get("messages")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise CallError("invalid", f"{method}() returned the messages {messages!r:.80}; return at least one")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise CallError(
                "invalid", f"{method}() returned the message {message!r:.80}; return dicts of role and content"
            )
    texts, roles = ([message[key] for message in messages] for key in ("content", "role"))
    extras = [{key: message[key] for key in OF_MESSAGES if message.get(key)} for message in messages]
    for text in (*texts, *roles):
        _check_encodable(method, text)
    declared = {name: result.get(name) for name in ("tools", "sampling")}
    declared["extras"] = extras if any(extras) else None
    return {"observations": texts, "roles": roles, **_as_json(method, **declared)}


def _as_json(method: str, **values: Any) -> dict[str, str]:
    """Return those of the values that `reset` or `step` returned that aren't empty, each as JSON."""
    found = {}
    for name, value in values.items():
        try:
            if value:
                found[name] = json.dumps(value, ensure_ascii=False)
                _check_encodable(method, found[name])
        except (TypeError, ValueError, RecursionError) as error:
            what = "messages" if name == "extras" else name
            raise CallError("invalid", f"{method}() returned {what} that aren't JSON: {error}") from error
    return found


def read_step(result: object, max_characters: int) -> dict[str, Any]:
    """Return what `step` returned, in JSON's types.

    Raises:
        CallError: It is no observation, reward, done, and metrics.
    """
    if not isinstance(result, tuple) or len(result) not in (3, 4):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise CallError("invalid", f"step() returned {kind}: {result!r:.80}; {RESULT}")
    observation, reward, done, metrics = result if len(result) == 4 else (*result, {})
    if type(done).__name__ not in ("bool", "bool_"):  # the latter is numpy's
        raise CallError("invalid", f"step() returned done={done!r:.80}, a {type(done).__name__}; return True or False")
    if not isinstance(metrics, Mapping):
        raise CallError("invalid", f"step() returned metrics={metrics!r:.80}; return a dict of numbers")
    for name in metrics:
        _check_encodable("step", str(name))
    return {
        **read_next(observation, max_characters),
        "reward": _number("reward", reward),
        "done": bool(done),
        "metrics": {str(name): _number(f"metric {name!r}", value) for name, value in metrics.items()},
    }


def read_next(observation: object, max_characters: int) -> dict[str, Any]:
    """Return what `step` returned as its observation: messages, perhaps after an earlier turn, or a whole chat.

    Raises:
        CallError: It is none of these.
    """
    if not isinstance(observation, Mapping):
        return {"observations": read_observation("step", observation, max_characters)}
    if "messages" in observation:
        return read_chat("step", observation)
    after = observation.get("after")
    if type(after) is not int or after < 1:
        raise CallError(
            "invalid",
            f"step() returned the observation {observation!r:.80}; a dict has `messages`, or `observation` and "
            "`after`, the number of a turn from 1 on",
        )
    texts = read_observation("step", observation.get("observation"), max_characters)
    return {"observations": texts, "after": after, **_as_json("step", sampling=observation.get("sampling"))}


def read_observation(method: str, value: object, max_characters: int) -> list[str]:
    """Return an observation as a list of texts, of which all together are cut at `max_characters`.

    Raises:
        CallError: It is no text or list of texts, or can't be encoded.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        what = f"{value!r:.80}, a {type(value).__name__}"
        raise CallError("invalid", f"{method}() returned the observation {what}; return a text, or a list of texts")
    if len(texts) > MAX_MESSAGES:
        raise CallError("invalid", f"{method}() returned {len(texts)} messages; return at most {MAX_MESSAGES}")
    left, kept = max_characters, []
    for text in texts:
        kept.append(text[:left])
        left -= len(kept[-1])
        if (num_cut := sum(map(len, texts)) - max_characters) > 0 and left == 0:
            kept[-1] += f"\n[{num_cut} more characters were cut]"
            break
    for text in kept:
        _check_encodable(method, text)
    return kept


def _check_encodable(method: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CallError(
            "invalid",
            f"{method}() returned a text with the lone surrogate {text[error.start]!r} at character "
            f"{error.start}, which no tokenizer can encode; decode its bytes with errors='replace'",
        ) from error


def read_role(environment: object) -> str:
    """Return the role of the environment's messages.

    Raises:
        CallError: It is no text.
    """
    role = getattr(environment, "role", "user")
    if not isinstance(role, str) or not role or not role.isprintable():
        raise CallError("invalid", f"the environment's role is {role!r:.80}; set it to a text, such as 'tool'")
    return role


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):  # floats, ints, bools and numpy's scalars
        kind = type(value).__name__
        raise CallError("invalid", f"step() returned the {what} {value!r:.80}, a {kind}; return a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CallError("invalid", f"step() returned the {what} {value!r:.80}; return a finite number")
    return number
