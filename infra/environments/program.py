"""A program as an environment: it asks its model itself, over an API (`model_apis`) that a server of this process has.

It runs once per trajectory, in a sandbox and a folder of its own. It is a black box: if this process is lost, it is
started again, and asks for the turns that it had.
"""

import asyncio
import functools
import inspect
import json
import math
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from infra.environments.launch import ERROR_CHARACTERS, fill, programs_folder, remove_folder
from infra.environments.sandbox import LocalProcess, open_sandbox
from infra.integrations.conversation import ChatError, Conversation, Request
from infra.integrations.model_apis import MODEL, ModelApi, begin_task, complete, serve
from infra.processes import take_all_files
from rl_core.environments.base import Endpoint, FinishedProgram, Launch, Step, Task
from rl_core.user_code import import_user_module
from schemas.errors import EnvironmentImportError

# What a request may set besides messages and model.
SETTINGS = ("stream", "stream_options", "tools", "user", "metadata", "stop", "logprobs", "n")
MAX_FILE_BYTES = 2**30
OUTPUT_BYTES = 2**16  # of the end of what is printed
# Between two looks at a program's threads: how long, and how many rounds of the event loop it takes to read what came
# before the first look, and to send what was answered before.
REST_POLL_SECONDS, REST_ROUNDS = 0.005, 16


class Gateway:
    """The server that the programs of this process ask.

    Attributes:
        own_files: How many files a process could have open before; this one takes all that it may, as each program has
            some in it.
    """

    def __init__(self) -> None:
        self.own_files = take_all_files()
        self._conversations: dict[str, tuple[str, Conversation]] = {}  # with their keys, by number
        self._num_opened = 0
        self._endpoint: asyncio.Task[Endpoint] | None = None

    async def open(self, conversation: Conversation) -> tuple[str, str, Endpoint]:
        """Have a conversation be asked for; return its number, which is its path, its key, and the server."""
        if self._endpoint is None:
            self._endpoint = begin_task(self._serve())
        try:
            endpoint = await asyncio.shield(self._endpoint)
        except OSError:  # the next one tries again
            self._endpoint = None
            raise
        self._num_opened += 1
        number, key = str(self._num_opened), secrets.token_urlsafe()
        self._conversations[number] = key, conversation
        return number, key, endpoint

    def close(self, number: str) -> None:
        """Forget a conversation."""
        self._conversations.pop(number)[1].fail(ChatError("the trajectory has ended"))

    async def _serve(self) -> Endpoint:
        path = os.path.join(programs_folder(), f"model-{secrets.token_hex(4)}.sock")
        return Endpoint(await serve(self._answer, "/{number}/v1", path), path)

    async def _answer(self, request: web.Request, api: ModelApi) -> web.StreamResponse:
        key, conversation = self._conversations.get(request.match_info["number"], ("", None))
        given = request.headers.get("Authorization", "").removeprefix("Bearer "), request.headers.get("x-api-key", "")
        if conversation is None or not any(secrets.compare_digest(each.encode(), key.encode()) for each in given):
            return api.refusal(401, "this is not the key of this trajectory")
        return await complete(request, conversation, api)


gateway = functools.cache(Gateway)


class Program:
    """A trajectory of a program; see `schemas.config.environment.ProgramEnvironment`.

    Args:
        task: The data row, which the program reads as JSON from its standard input, with the seed.
        seed: The seed.
        command: The program and its arguments, as in the config.
        sandbox: Where it runs, as `infra.environments.sandbox.open_sandbox` takes it.
        parser: How calls are written, of `rl_core.environments.calls.PARSERS`, or "template": turns are read before.
        grader: Import path of a function of a `FinishedProgram`; None: the program prints its reward.
        memory_bytes: Most memory that it has.
        sampling: What its requests may set to this value only.
        rest_seconds: How long the program may take, once it has asked, until all of its threads wait, so that parallel
            requests are answered in an order of their own; 0: they are in that in which they come.

    Raises:
        EnvironmentImportError: The grader or the user's sandbox can't be imported, or is none.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        command: Sequence[str],
        sandbox: Mapping[str, Any],
        parser: str,
        grader: str | None,
        memory_bytes: int,
        sampling: Mapping[str, Any],
        rest_seconds: float,
    ) -> None:
        self.role = "user"
        self._task, self._seed, self._memory_bytes = task, seed, memory_bytes
        self._command, self._sandbox = command, open_sandbox(**sandbox)
        self._grade = None if grader is None else load_grader(grader)
        own = None if parser == "template" else parser
        self._conversation = Conversation("the program", None, SETTINGS, sampling, own)
        self._rest_seconds = rest_seconds
        self._seconds_left: Callable[[], float] = lambda: math.inf
        self._is_expected: Callable[[Any, str], bool] | None = None
        self._number: str | None = None
        self._folder: Path | None = None
        self._ended: asyncio.Task[int] | None = None  # its exit code

    async def reset(self) -> dict[str, Any]:
        """Start the program, and return the chat and tools of its first request, which are the trajectory's prompt."""
        self._number, key, endpoint = await gateway().open(self._conversation)
        await self._start(key, endpoint)
        request = await self._next_request(lambda request: (request.as_chat(), self.role))
        if request is None:
            how = _describe_end(await self._end_of_program())
            raise ChatError(f"the program ended with {how} before it asked its model anything; {self._said()}")
        return request.as_chat()

    async def step(self, action: str) -> Step:
        """Answer the outstanding request by a turn (`write_turn`); return what the next one adds, or the reward."""
        ended = self._end_of_program()
        await asyncio.wait({ended}, timeout=0)  # takes note of an end that has just come
        if ended.done():
            ended.result()  # or what has failed instead of the program
            raise ChatError(f"the program ended while it waited for its model's turn; {self._said()}")
        self._conversation.answer(**json.loads(action))
        request = await self._next_request(self._conversation.observe)
        if request is None:
            return await self._end()
        observation, self.role = self._conversation.observe(request)
        return Step(observation)

    def expect(self, is_expected: Callable[[Any, str], bool]) -> None:
        """Note what is asked next, as it was before: that tells it by an observation and the role of its messages."""
        self._is_expected = is_expected

    def note_limit(self, seconds_left: Callable[[], float]) -> None:
        """Note what returns the seconds that the next call's time limit leaves."""
        self._seconds_left = seconds_left

    def take_request_counts(self) -> dict[str, float]:
        """Return what was counted of the requests to the model since the last call."""
        return self._conversation.take_counts()

    async def _next_request(self, observe: Callable[[Request], tuple[Any, str]]) -> Request | None:
        """Return what the program asks next; None if it has ended."""
        is_expected, self._is_expected = self._is_expected, None
        known = None if is_expected is None else lambda request: is_expected(*observe(request))
        return await self._conversation.next_request(self._end_of_program(), known, self._settle)

    async def _settle(self) -> None:
        """Wait until all threads of the program wait: what they were to ask by themselves is there then.

        It takes half of what is left of the call's time at most, as the program has asked in time. A program that
        doesn't come to rest in all of `rest_seconds` is not waited for again.
        """
        if not self._rest_seconds or not isinstance(self._sandbox, LocalProcess):
            return
        loop, before = asyncio.get_running_loop(), None
        seconds = min(self._rest_seconds, self._seconds_left() / 2)
        until = loop.time() + seconds
        while (counts := self._sandbox.count_sleeps()) is None or counts != before:
            before = counts
            if loop.time() > until:
                self._conversation.count("unrested")
                self._rest_seconds = self._rest_seconds if seconds < self._rest_seconds else 0.0
                return
            await asyncio.sleep(REST_POLL_SECONDS)
            for _ in range(REST_ROUNDS):
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Kill the program with what it has started, and remove its folder."""
        if self._number is not None:
            gateway().close(self._number)
        try:
            await self._sandbox.kill()
        finally:
            if self._folder is not None:
                await asyncio.to_thread(remove_folder, self._folder)

    def describe_timeout(self) -> str:
        is_asked = self._conversation.is_asked
        how = "asked its model, but not come to rest" if is_asked else "neither asked its model nor ended"
        return f"the program has {how}; {self._said()}"

    async def _start(self, key: str, endpoint: Endpoint) -> None:
        """Start the program."""
        self._folder = Path(tempfile.mkdtemp(dir=programs_folder()))
        self._home.mkdir()
        launch = Launch(
            command=fill(self._command, self._task["info"]),
            variables=_variables(f"{self._sandbox.url(endpoint)}/{self._number}/v1", key),
            task=json.dumps({**self._task, "seed": self._seed}).encode(),
            home=self._home,
            stdout=self._folder / "stdout",
            stderr=self._folder / "stderr",
            endpoint=endpoint,
            memory_bytes=self._memory_bytes,
            file_bytes=MAX_FILE_BYTES,
            open_files=gateway().own_files,
        )
        await self._sandbox.start(launch)
        self._ended = begin_task(self._sandbox.wait())

    async def _end(self) -> Step:
        """Return the step that ends the trajectory."""
        exit_code = await self._end_of_program()
        output = self._end_of("stdout")
        if self._grade is None:
            if exit_code != 0:
                raise ChatError(f"the program ended with {_describe_end(exit_code)}; {self._said()}")
            return Step("", *_printed(output))
        chats = [[message.as_openai() for message in chat] for chat in self._conversation.chats]
        finished = FinishedProgram(self._task, chats[-1], self._home, exit_code, output, chats)
        result = await asyncio.to_thread(self._grade, finished)
        if inspect.isawaitable(result):
            result = await result
        reward, metrics = result if isinstance(result, tuple) else (result, {})
        return Step("", reward, True, metrics)

    @property
    def _home(self) -> Path:
        """The program's own folder."""
        assert self._folder is not None, "the program is not started"
        return self._folder / "home"

    def _end_of(self, name: str) -> str:
        """Return the end of what the program wrote to its standard output or error."""
        assert self._folder is not None, "the program is not started"
        try:  # the program can put anything in its place
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return file.read().decode(errors="replace")

    def _end_of_program(self) -> "asyncio.Task[int]":
        assert self._ended is not None, "a step before the reset"
        return self._ended

    def _said(self) -> str:
        """Return the end of what the program wrote to its standard error, for messages."""
        said = self._end_of("stderr").strip()
        return f"its stderr ends with: {said[-ERROR_CHARACTERS:]}" if said else "it wrote nothing to stderr"


def write_turn(text: str, num_before: int, num_tokens: int, **ending: Any) -> str:
    """Return the action that gives a turn to a program.

    Args:
        text: The turn.
        num_before: The tokens before it.
        num_tokens: Those that were sampled.
        ending: What else `Conversation.answer` takes, as far as there is some.
    """
    usage = {"prompt_tokens": num_before, "completion_tokens": num_tokens, "total_tokens": num_before + num_tokens}
    return json.dumps({"text": text, "usage": usage, **{name: value for name, value in ending.items() if value}})


def load_grader(path: str) -> Callable[[FinishedProgram], Any]:
    """Return the function at an import path.

    Raises:
        EnvironmentImportError: It can't be imported, or is no function.
    """
    module, name = import_user_module("environment.grader", path, EnvironmentImportError)
    grade = getattr(module, name, None)
    if not callable(grade):
        raise EnvironmentImportError(
            f"environment.grader {path!r}: there is no function {name!r} in {module.__file__}; define it there, with "
            "one parameter, a rl_core.environments.base.FinishedProgram"
        )
    return grade


def _printed(output: str) -> tuple[Any, bool, Any]:
    """Return the reward and the metrics that a program has printed, and that the trajectory is done."""
    last = output.rstrip().rpartition("\n")[2]
    with suppress(ValueError, RecursionError):
        result = json.loads(last)
        if isinstance(result, dict) and "reward" in result:
            return result["reward"], True, result.get("metrics") or {}
    raise ChatError(
        f"the last line that the program printed is {last!r:.200}, not its reward; print a line of JSON such as "
        '{"reward": 1.0, "metrics": {}}, or set environment.grader'
    )


def _variables(url: str, key: str) -> dict[str, str]:
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, [own, urlsplit(url).hostname]))
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # which its clients append
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
        "PYTHONHASHSEED": "0",  # with a fixed order of sets, a program that is started again asks the same
        "no_proxy": hosts,
        "NO_PROXY": hosts,
    }


def _describe_end(code: int) -> str:
    return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
