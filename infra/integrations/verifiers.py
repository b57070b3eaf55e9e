"""Environments of verifiers (`verifiers.v1`): `infra.integrations.verifiers:VerifiersEnvironment`.

They ask their model themselves. Here, the model is a server on the loopback interface of the environment process: what
a request adds to the chat is an observation, and the request waits until the turn that follows has been sampled.
"""

import asyncio
import functools
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextvars import Context
from typing import Any, NamedTuple

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout, web

from rl_core.environments.base import Step, Task
from rl_core.environments.calls import without_reasoning

HARNESS = "sluice_chat"  # its name for verifiers, which imports plugins by the names of top-level modules
SESSION = "X-Session-ID"  # a header of verifiers' requests: the id of the trace that they belong to
SETTINGS = ("messages", "model")  # what a request may set; all else is up to the run's engine
MAX_REQUEST_BYTES = 2**30

__all__ = ["ChatHarness"]  # where verifiers looks for a plugin's class
sys.modules[HARNESS] = sys.modules[__name__]
os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))


class EpisodeError(Exception):
    """The environment failed, or did what can't be trained on; its trajectory has no reward."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays a chat without tools in this process, as verifiers' `null` does in a program with packages of its own."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for the model's next turn; verifiers records it."""
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [{"content": "", **message.model_dump(exclude_none=True)} for message in said]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        url, body = f"{endpoint}/chat/completions", {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            ClientSession(timeout=ClientTimeout()) as client,
            client.post(url, json=body, headers=headers) as reply,
        ):
            return vf.ProgramResult(exit_code=int(not reply.ok), stdout="", stderr=await reply.text())


class Message(NamedTuple):
    """A message of a chat; the model's is without its reasoning."""

    role: str
    content: str


class Request(NamedTuple):
    """A request of a model's turn, which is outstanding until `turn` is set."""

    session: str
    body: dict[str, Any]
    turn: "asyncio.Future[str]"

    def messages(self) -> list[Message]:
        """Return its chat.

        Raises:
            EpisodeError: It asks for something else than the next turn of a chat of texts.
        """
        if others := sorted(name for name, value in self.body.items() if value is not None and name not in SETTINGS):
            raise EpisodeError(
                f"the environment asks its model with {', '.join(others)}, but here it is a chat without tools, "
                "whose turns come whole and are sampled as the run's config says; take it out of the environment's"
            )
        return [Message(message["role"], _text(message.get("content"))) for message in self.body["messages"]]


class Worker:
    """What the episodes of a process share: their environment, and the server that is its model.

    Args:
        env: The environment's config, as JSON.
    """

    def __init__(self, env: str) -> None:
        self.environment = _load(json.loads(env))
        self._requests: dict[str, asyncio.Queue[Request]] = {}  # of each trace
        self._url: asyncio.Future[str] | None = None
        self._serving: asyncio.Task[None] | None = None

    def task(self, fields: Mapping[str, Any]) -> vf.Task:
        """Return the task with these fields."""
        task_class = type(self.environment.taskset).task_type()
        return task_class(task_class.data_type().model_validate(fields), self.environment.config.taskset.task)

    async def play(self, task: vf.Task, requests: "asyncio.Queue[Request]") -> vf.Episode:
        """Play an episode, and put the requests of its model into the queue."""
        if self._url is None:
            self._url = asyncio.get_running_loop().create_future()
            # In a context of its own, as it belongs to no environment's call; the attribute keeps it alive.
            self._serving = Context().run(asyncio.create_task, self._serve(self._url))
        client = vf.EvalClientConfig(base_url=await asyncio.shield(self._url), api_key_var="SLUICE_HAS_NO_KEY")
        traces: list[str] = []

        def begin(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._requests[trace.id] = requests

        try:
            return await self.environment.run_episode(task, vf.ModelContext("policy", client), on_trace=begin)
        finally:
            for trace in traces:
                del self._requests[trace]

    async def _serve(self, url: "asyncio.Future[str]") -> None:
        """Serve until the process ends."""
        secret = secrets.token_urlsafe()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post(f"/{secret}/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        try:
            async with self.environment.serving():
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}")
                await asyncio.Event().wait()
        except Exception as error:
            if url.done():
                raise
            url.set_exception(error)

    async def _complete(self, request: web.Request) -> web.Response:
        session = request.headers.get(SESSION, "")
        if session not in self._requests:
            raise web.HTTPNotFound(text="no episode is being played for this request")
        turn = asyncio.get_running_loop().create_future()
        self._requests[session].put_nowait(Request(session, await request.json(), turn))
        action = await turn
        answer = without_reasoning(action)
        message = {"role": "assistant", "content": answer.strip()}
        if len(answer) < len(action):
            reasoning = action[: len(action) - len(answer)].removesuffix("</think>")
            message["reasoning_content"] = reasoning.partition("<think>")[2] or reasoning
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return web.json_response(completion)


worker_of = functools.cache(Worker)


class VerifiersEnvironment:
    """An episode of an environment of verifiers, one of whose agents is the model.

    Its reward is that of the model's trace when the episode has ended; the metrics are the trace's, and each of its
    rewards as `reward/<name>`. A request must extend the chat of the one before it by messages of one role.

    Args:
        task: The data row. The entry `task` of its `extra_info` has the fields of verifiers' task, with which the
            environment's first request has the row's prompt, or extends it.
        seed: Has no effect: what is random in an environment of verifiers, its task says.
        env: The environment's config, as in the section `env` of a config of verifiers. Agents without a harness or a
            runtime of their own are `ChatHarness` in this process.

    Raises:
        ValueError: The config or the task is not one of the environment's.
    """

    def __init__(self, task: Task, seed: int, *, env: Mapping[str, Any]) -> None:
        if "task" not in task["info"]:
            raise ValueError("the data row has no extra_info.task, the fields of its verifiers task")
        self.role = "user"
        self._chat = [Message(message["role"], message["content"]) for message in task["prompt"]]
        self._worker = worker_of(json.dumps(env))
        self._task = self._worker.task(task["info"]["task"])
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._request: Request | None = None
        self._episode: asyncio.Task[vf.Episode] | None = None

    async def reset(self) -> list[str] | None:
        """Begin the episode, and return what its first request adds to the data row's prompt."""
        self._episode = asyncio.create_task(self._worker.play(self._task, self._requests))
        self._request = await self._next_request()
        if self._request is None:
            self._check(self._episode.result())
            raise EpisodeError("the episode ended before the environment asked its model anything")
        return self._observe(self._request) or None

    async def step(self, action: str) -> Step:
        """Answer the outstanding request by the turn; return what the next one adds to the chat, or the reward."""
        assert self._request is not None, "a step before the reset"
        assert self._episode is not None, "a step before the reset"
        self._chat.append(Message("assistant", _answer(action)))
        session, before = self._request.session, len(self._chat)
        self._request.turn.set_result(action)
        self._request = await self._next_request()
        if self._request is None:
            return self._end(self._episode.result(), session)
        if self._request.session != session:
            raise EpisodeError(
                "a second agent, or a second attempt of the first one, asks the model; give each agent of the "
                "environment but one a client and a model of its own, and set its retries to 0"
            )
        observations = self._observe(self._request)
        if len(self._chat) == before:
            raise EpisodeError("the environment asks its model for a turn after its own, without a message between")
        return Step(observations)

    async def close(self) -> None:
        """End the episode."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)
        if self._request is not None:
            self._request.turn.cancel()

    async def _next_request(self) -> Request | None:
        """Wait for the next request; return None when the episode has ended instead."""
        assert self._episode is not None, "no episode has begun"
        request = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({request, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            request.cancel()

    def _observe(self, request: Request) -> list[str]:
        """Add a request's new messages to the chat, and return their texts.

        Raises:
            EpisodeError: The request doesn't extend the chat, or not by messages of one role.
        """
        messages, known = request.messages(), len(self._chat)
        for at, expected in enumerate(self._chat):
            found = messages[at] if at < len(messages) else None
            if found != expected:
                raise EpisodeError(
                    f"the environment doesn't extend the chat: message {at} of its request is {found!r:.200}, but was "
                    f"{expected!r:.200}; a trajectory keeps what the model has sampled, and begins with the data row's "
                    "prompt, which must be that of its extra_info.task"
                )
        new = messages[known:]
        if new:
            self.role = new[0].role
            if self.role == "assistant" or any(message.role != self.role for message in new):
                roles = ", ".join(message.role for message in new)
                raise EpisodeError(f"a request adds messages of roles {roles}; all must be of one, and not the model's")
        self._chat.extend(new)
        return [message.content for message in new]

    def _end(self, episode: vf.Episode, session: str) -> Step:
        """Return the step that ends the trajectory.

        Raises:
            EpisodeError: The episode failed, or its trace has no reward.
        """
        self._check(episode)
        (trace,) = (trace for trace in episode.traces if trace.id == session)
        if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
            raise EpisodeError(f"the environment has not scored {', '.join(unscored)} (stop: {trace.stop_condition})")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.score for name, reward in trace.rewards.items()}
        return Step("", trace.reward, True, metrics)

    def _check(self, episode: vf.Episode) -> None:
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")


def _load(env: Mapping[str, Any]) -> vf.Env:
    """Make an environment whose agents are in this process, unless its config or its taskset says otherwise.

    Raises:
        ValueError: The config is not the environment's, or limits tokens.
    """
    config = vf.resolve_env_config(dict(env))
    raw = json.loads(config.model_dump_json())
    for name, harness in config.agent_harnesses().items():
        agent, given = raw[name], env.get(name) or {}
        if limits := [key for key in agent if key.endswith("_tokens") and agent[key] is not None]:
            raise ValueError(
                f"env.{name}.{limits[0]} has no effect here; use environment.max_turn_tokens or "
                "rollout.max_response_tokens"
            )
        if agent["harness"] is None and harness.id == "bash":
            agent["harness"] = {"id": HARNESS}
        if (
            "runtime" not in given and agent["runtime"]["type"] == "prime"
        ):  # the library's default, on servers of its maker
            agent["runtime"] = {"type": "subprocess"}
    return vf.load_environment(vf.resolve_env_config(raw))


def _answer(action: str) -> str:
    """Return a turn without its reasoning, as verifiers sees it."""
    return without_reasoning(action).strip()


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return a message's text.

    Raises:
        EpisodeError: Not all of it is text.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    if others := sorted({part["type"] for part in content} - {"text"}):
        raise EpisodeError(f"a message has content of type {', '.join(others)}; the model reads text only")
    return "\n".join(part["text"] for part in content)
