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
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout, web

from infra.integrations.conversation import ChatError, Conversation, Message
from infra.integrations.model_apis import ModelApi, begin_task, complete, serve
from rl_core.environments.base import Step, Task

HARNESS = "sluice_chat"  # its name for verifiers, which imports plugins by the names of top-level modules
SETTINGS = ("stream", "stream_options", "tools")  # what its requests may have besides messages and model
SESSION = "X-Session-ID"  # a header of verifiers' requests: the id of the trace that they belong to

__all__ = ["ChatHarness"]  # where verifiers looks for a plugin's class
sys.modules[HARNESS] = sys.modules[__name__]
os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))


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


class Worker:
    """What the episodes of a process share: their environment, and the server that is its model."""

    def __init__(self, env: str) -> None:
        self.environment = _load(json.loads(env))
        self._conversations: dict[str, Conversation] = {}  # of each trace
        self._url: asyncio.Future[str] | None = None
        self._serving: asyncio.Task[None] | None = None

    def task(self, fields: Mapping[str, Any]) -> vf.Task:
        """Return the task with these fields."""
        task_class = type(self.environment.taskset).task_type()
        return task_class(task_class.data_type().model_validate(fields), self.environment.config.taskset.task)

    async def play(self, task: vf.Task, conversation: Conversation) -> vf.Episode:
        """Play an episode, whose model is asked in this conversation."""
        if self._url is None:
            self._url = asyncio.get_running_loop().create_future()
            self._serving = begin_task(self._serve(self._url))  # the attribute keeps it alive
        client = vf.EvalClientConfig(base_url=await asyncio.shield(self._url), api_key_var="SLUICE_HAS_NO_KEY")
        traces: list[str] = []

        def begin(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._conversations[trace.id] = conversation

        try:
            return await self.environment.run_episode(task, vf.ModelContext("policy", client), on_trace=begin)
        finally:
            for trace in traces:
                del self._conversations[trace]

    async def _serve(self, url: "asyncio.Future[str]") -> None:
        """Serve until the process ends."""
        secret = secrets.token_urlsafe()
        try:
            async with self.environment.serving():
                url.set_result(f"{await serve(self._complete, f'/{secret}')}/{secret}")
                await asyncio.Event().wait()
        except Exception as error:
            if url.done():
                raise
            self._url = None  # the next episode tries again
            url.set_exception(error)

    async def _complete(self, request: web.Request, api: ModelApi) -> web.StreamResponse:
        session = request.headers.get(SESSION, "")
        if session not in self._conversations:
            return api.refusal(404, "no episode is being played for this request")
        return await complete(request, self._conversations[session], api, session)


worker_of = functools.cache(Worker)


class VerifiersEnvironment:
    """An episode of an environment of verifiers, one of whose agents is the model.

    Its reward is that of the model's trace when the episode has ended; the metrics are the trace's, and each of its
    rewards as `reward/<name>`. Requests may have tools, and leave the chat of the one before them.

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
        chat = [Message(message["role"], message["content"]) for message in task["prompt"]]
        self._conversation = Conversation("the environment", chat, SETTINGS)
        self._worker = worker_of(json.dumps(env))
        self._task = self._worker.task(task["info"]["task"])
        self._episode: asyncio.Task[vf.Episode] | None = None

    async def reset(self) -> list[str] | dict[str, Any] | None:
        """Begin the episode, and return what its first request adds to the row's prompt, or its chat with tools."""
        self._episode = asyncio.create_task(self._worker.play(self._task, self._conversation))
        request = await self._conversation.next_request(self._episode)
        if request is None:
            self._check(self._episode.result())
            raise ChatError("the episode ended before the environment asked its model anything")
        if request.tools:
            return request.as_chat()
        if request.messages:
            self.role = request.messages[0].role
        return [message.content for message in request.messages] or None

    async def step(self, action: str) -> Step:
        """Answer the outstanding request by the turn; return what the next one adds to the chat, or the reward."""
        assert self._episode is not None, "a step before the reset"
        self._conversation.answer(action)
        request = await self._conversation.next_request(self._episode)
        if request is None:
            return self._end(self._episode.result())
        observation, self.role = self._conversation.observe(request)
        return Step(observation)

    def take_request_counts(self) -> dict[str, float]:
        """Return what was counted of the requests to the model since the last call."""
        return self._conversation.take_counts()

    async def close(self) -> None:
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)
        self._conversation.fail(ChatError("the trajectory has ended"))

    def _end(self, episode: vf.Episode) -> Step:
        """Return the step that ends the trajectory."""
        self._check(episode)
        (trace,) = (trace for trace in episode.traces if trace.id == self._conversation.owner)
        if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
            raise ChatError(f"the environment has not scored {', '.join(unscored)} (stop: {trace.stop_condition})")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.score for name, reward in trace.rewards.items()}
        return Step("", trace.reward, True, metrics)

    def _check(self, episode: vf.Episode) -> None:
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise ChatError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")


def _load(env: Mapping[str, Any]) -> vf.Env:
    """Make an environment whose agents are in this process, unless its config or its taskset says otherwise."""
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
