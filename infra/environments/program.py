"""A program as an environment: it asks its model itself, over an API (`model_apis`) that a server of this process has.

It runs once per trajectory, in a process group and a folder of its own. It is a black box: if this process is lost, it
is started again, and asks for the turns that it had.
"""

import asyncio
import fcntl
import functools
import inspect
import json
import os
import resource
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from infra.integrations.conversation import ChatError, Conversation, Request
from infra.integrations.model_apis import MODEL, ModelApi, begin_task, complete, serve
from infra.processes import lifeline
from infra.processes.isolated import has_died, kill_group
from rl_core.environments.base import FinishedProgram, Step, Task
from rl_core.user_code import import_user_module
from schemas.errors import EnvironmentImportError

# What a request may set besides messages and model.
SETTINGS = ("stream", "stream_options", "tools", "user", "metadata")
MAX_FILE_BYTES = 2**30
OUTPUT_BYTES = 2**16  # of the end of what is printed
ERROR_CHARACTERS = 600
_PREFIX = f"sluice-programs-{os.getuid()}-"
# Limits itself, and is then replaced by the program, which ends with this process: the kernel kills its group.
_LAUNCHER = """
import os, resource, runpy, sys
lifeline, task, memory, size, files, *command = sys.argv[1:]
runpy.run_path(lifeline)["end_with_parent"](with_programs=True)
os.dup2(int(task), 0)
for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(kind)[1]
    most = int(most) if hard == resource.RLIM_INFINITY else min(int(most), hard)
    resource.setrlimit(kind, (most, most))
resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]} can't be started: {error.strerror}")
"""


class Gateway:
    """The server that the programs of this process ask.

    Attributes:
        own_files: How many files a process could have open before; this one takes all that it may, as each program has
            some in it.
    """

    def __init__(self) -> None:
        self.own_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._conversations: dict[str, tuple[str, Conversation]] = {}  # with their keys, by number
        self._num_opened = 0
        self._url: asyncio.Task[str] | None = None

    async def open(self, conversation: Conversation) -> tuple[str, str, str]:
        """Have a conversation be asked for; return its number, the URL that programs know as the API's, and its key."""
        if self._url is None:
            self._url = begin_task(serve(self._answer, "/{number}/v1"))
        try:
            url = await asyncio.shield(self._url)
        except OSError:  # the next one tries again
            self._url = None
            raise
        self._num_opened += 1
        number, key = str(self._num_opened), secrets.token_urlsafe()
        self._conversations[number] = key, conversation
        return number, f"{url}/{number}/v1", key

    def close(self, number: str) -> None:
        """Forget a conversation."""
        self._conversations.pop(number)[1].fail(ChatError("the trajectory has ended"))

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
        command: The program and its arguments, with `{workdir}` and `{python}`.
        grader: Import path of a function of a `FinishedProgram`; None: the program prints its reward.
        memory_bytes: Most address space of each of its processes.
        sampling: What its requests may set to this value only.

    Raises:
        EnvironmentImportError: The grader can't be imported, or is no function.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        command: Sequence[str],
        grader: str | None,
        memory_bytes: int,
        sampling: Mapping[str, Any],
    ) -> None:
        self.role = "user"
        self._task, self._seed, self._memory_bytes = task, seed, memory_bytes
        self._command = resolve(command)
        self._grade = None if grader is None else load_grader(grader)
        self._conversation = Conversation("the program", None, SETTINGS, sampling)
        self._is_expected: Callable[[Any, str], bool] | None = None
        self._number: str | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def reset(self) -> dict[str, Any]:
        """Start the program, and return the chat and tools of its first request, which are the trajectory's prompt."""
        self._number, url, key = await gateway().open(self._conversation)
        self._ended = self._start(url, key)
        request = await self._next_request(lambda request: (request.as_chat(), self.role))
        if request is None:
            how = kill_group(self._started())
            raise ChatError(f"the program ended with {how} before it asked its model anything; {self._said()}")
        return request.as_chat()

    async def step(self, action: str) -> Step:
        """Answer the outstanding request by a turn (`write_turn`); return what the next one adds, or the reward."""
        if has_died(self._started().pid):
            raise ChatError(f"the program ended while it waited for its model's turn; {self._said()}")
        turn = json.loads(action)
        self._conversation.answer(turn["text"], turn["usage"])
        request = await self._next_request(self._conversation.observe)
        if request is None:
            return await self._end()
        observation, self.role = self._conversation.observe(request)
        return Step(observation)

    def expect(self, is_expected: Callable[[Any, str], bool]) -> None:
        """Note what is asked next, as it was before: that tells it by an observation and the role of its messages."""
        self._is_expected = is_expected

    def take_request_counts(self) -> dict[str, float]:
        """Return what was counted of the requests to the model since the last call."""
        return self._conversation.take_counts()

    async def _next_request(self, observe: Callable[[Request], tuple[Any, str]]) -> Request | None:
        """Return what the program asks next; None if it has ended."""
        is_expected, self._is_expected = self._is_expected, None
        known = None if is_expected is None else lambda request: is_expected(*observe(request))
        return await self._conversation.next_request(self._ended, known)

    async def close(self) -> None:
        """Kill the program and its children, and remove its folder."""
        if self._number is not None:
            gateway().close(self._number)
        if self._process is not None:
            if self._process.returncode is None:
                _kill_descendants(self._process.pid)
                kill_group(self._process)
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._folder is not None:
            await asyncio.to_thread(_remove, self._folder)

    def describe_timeout(self) -> str:
        """Return what the program did instead, after a time-out."""
        return f"the program has neither asked its model nor ended; {self._said()}"

    def _start(self, url: str, key: str) -> "asyncio.Future[None]":
        """Start the program; return what is done when it has ended."""
        self._folder = Path(tempfile.mkdtemp(dir=_root()))
        self._home.mkdir()
        with (
            tempfile.TemporaryFile() as task,
            (self._folder / "stdout").open("wb") as output,
            (self._folder / "stderr").open("wb") as errors,
        ):
            task.write(json.dumps({**self._task, "seed": self._seed}).encode())
            task.seek(0)
            limits = [str(self._memory_bytes), str(MAX_FILE_BYTES), str(gateway().own_files)]
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, lifeline.__file__, str(task.fileno()), *limits]
            self._process = subprocess.Popen(
                [*launcher, *self._command],
                stdin=subprocess.PIPE,  # the lifeline
                stdout=output,
                stderr=errors,
                cwd=self._home,
                env=_variables(url, key, str(self._home)),
                pass_fds=(task.fileno(),),
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        ended, descriptor = loop.create_future(), os.pidfd_open(self._process.pid)

        def end() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(descriptor, end)
        return ended

    async def _end(self) -> Step:
        """Return the step that ends the trajectory.

        Raises:
            ChatError: The program failed, or there is no reward.
        """
        process = self._started()
        how = kill_group(process)  # what it has left running
        output = self._end_of("stdout")
        if self._grade is None:
            if process.returncode != 0:
                raise ChatError(f"the program ended with {how}; {self._said()}")
            return Step("", *_printed(output))
        chats = [[message.as_openai() for message in chat] for chat in self._conversation.chats]
        finished = FinishedProgram(self._task, chats[-1], self._home, process.returncode, output, chats)
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

    def _started(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "a step before the reset"
        return self._process

    def _said(self) -> str:
        """Return the end of what the program wrote to its standard error, for messages."""
        said = self._end_of("stderr").strip()
        return f"its stderr ends with: {said[-ERROR_CHARACTERS:]}" if said else "it wrote nothing to stderr"


def _kill_descendants(pid: int) -> None:
    """Kill what a running program has started, in other process groups and sessions, too."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                _kill_descendants(child)
                os.kill(child, signal.SIGKILL)


def _remove(folder: Path) -> None:
    """Remove a program's folder, whatever it has made read-only in it."""
    for place, names, _ in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            with suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def write_turn(text: str, num_before: int, num_tokens: int) -> str:
    """Return the action that gives a turn to a program.

    Args:
        text: The turn.
        num_before: The tokens before it.
        num_tokens: Those that were sampled.
    """
    usage = {"prompt_tokens": num_before, "completion_tokens": num_tokens, "total_tokens": num_before + num_tokens}
    return json.dumps({"text": text, "usage": usage})


def resolve(command: Sequence[str]) -> list[str]:
    """Return a command whose placeholders are replaced, and whose program is a path or a name on PATH."""
    places = {"{workdir}": os.getcwd(), "{python}": sys.executable}
    resolved = [functools.reduce(lambda text, name: text.replace(name, places[name]), places, part) for part in command]
    program = os.path.abspath(resolved[0]) if os.path.dirname(resolved[0]) else resolved[0]
    return [program, *resolved[1:]]


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


def _variables(url: str, key: str, folder: str) -> dict[str, str]:
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, [own, "127.0.0.1"]))
    return {
        **os.environ,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # which its clients append
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
        "HOME": folder,
        "TMPDIR": folder,
        "PYTHONHASHSEED": "0",  # with a fixed order of sets, a program that is started again asks the same
        "no_proxy": hosts,
        "NO_PROXY": hosts,
    }


@functools.cache
def _root() -> str:
    """Return the folder of this process's programs, and remove those that processes have left which were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _lock(str(left), fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)
    while True:
        root = tempfile.mkdtemp(prefix=_PREFIX)
        _lock(root, fcntl.LOCK_EX)
        if os.path.exists(root):  # no other process has removed it before it was locked
            return root


def _lock(folder: str, operation: int) -> None:
    """Lock a folder until this process ends; the kernel then unlocks it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
