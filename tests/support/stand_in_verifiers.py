"""What `verifiers.v1` 0.4 offers to a game of one agent and to who plays it.

The library itself can't be installed together with this project's pins; with `make verifiers`, the tests use it, too.
"""

import importlib
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, get_args

from aiohttp import ClientSession, web
from pydantic import BaseModel, ConfigDict

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TaskData(BaseModel):
    idx: int | None = None
    prompt: str | None = None
    system_prompt: str | None = None


class State(BaseModel):
    pass


class TaskConfig(Config):
    pass


class Task(Generic[A, B, C]):
    def __init__(self, data, config):
        self.data, self.config = data, config

    @classmethod
    def data_type(cls):
        return _parameters(cls)[0]


class TasksetConfig(Config):
    id: str
    task: TaskConfig = TaskConfig()


class Taskset(Generic[A, B]):
    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def task_type(cls):
        return _parameters(cls)[0]


class HarnessConfig(Config):
    id: str = "bash"


class Harness(Generic[A]):
    def resolve_prompt(self, data):
        return data.system_prompt, data.prompt


class AgentConfig(Config):
    harness: HarnessConfig | None = None
    runtime: dict[str, str] = {"type": "prime"}
    sampling: dict[str, float] = {}
    max_turns: int | None = None
    max_total_tokens: int | None = None


class EnvConfig(Config):
    taskset: TasksetConfig

    @property
    def env_id(self):
        return self.taskset.id

    def agent_harnesses(self):
        return {"player": self.player.harness or HarnessConfig()}


class EvalClientConfig(Config):
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


class UserMessage(BaseModel):
    role: str = "user"
    content: str


class Message(BaseModel):
    role: str
    content: str
    reasoning_content: str | None = None


@dataclass
class Trace:
    id: str
    messages: list = field(default_factory=list)
    rewards: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)
    errors: list = field(default_factory=list)
    stop_condition: str | None = None

    @property
    def num_turns(self):
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def reward(self):
        return sum(reward.score for reward in self.rewards.values())

    def record_reward(self, name, value):
        self.rewards[name] = SimpleNamespace(score=value)


@dataclass
class Episode:
    traces: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    ok: bool = False


Runtime = Any


class Agents:
    def __init__(self, player):
        self.player = player


class Player:
    """The agent of one episode, whose requests a server of its own relays to the model."""

    def __init__(self, env, ctx, episode, on_trace):
        self._env, self._ctx, self._episode, self._on_trace = env, ctx, episode, on_trace
        self._config = env.config.player

    @asynccontextmanager
    async def interaction(self, task):
        assert self._config.runtime == {"type": "subprocess"}
        trace = Trace(f"trace-{id(self)}-{len(self._episode.traces)}")
        self._episode.traces.append(trace)
        self._on_trace(trace)
        harness = _plugin(self._config.harness.id, Harness)()

        async def turn(said=None):
            if trace.num_turns == self._config.max_turns:
                trace.stop_condition = "max_turns"
                return SimpleNamespace(terminated=True)
            if said is not None:
                trace.messages.append(Message(role="user", content=said))
            data = task.data.model_copy(update={"prompt": trace.messages or task.data.prompt})
            endpoint = f"http://127.0.0.1:{self._env.port}/{trace.id}"
            self._env.relayed[trace.id] = self._ctx.client.base_url, self._config.sampling
            result = await harness.launch(self._ctx, trace, None, endpoint, "secret", {}, data)
            if result.exit_code:
                raise RuntimeError(result.stderr)
            reply = Message(**json.loads(result.stderr)["choices"][0]["message"])
            trace.messages = [*data.prompt] if trace.messages else [Message(role="user", content=task.data.prompt)]
            trace.messages.append(reply)
            return SimpleNamespace(terminated=False, last_reply=reply.content)

        yield SimpleNamespace(turn=turn, trace=trace)
        for name in (name for name in dir(task) if getattr(getattr(task, name), "is_metric", False)):
            trace.metrics[name] = await getattr(task, name)(trace)


class Env(Generic[A]):
    def __init__(self, config):
        self.config, self.relayed = config, {}
        self.taskset = load_taskset(config.taskset)

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/{trace}/chat/completions", self._relay)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        _, self.port = runner.addresses[0]
        yield

    async def _relay(self, request):
        assert request.headers["Authorization"] == "Bearer secret"
        url, sampling = self.relayed[request.match_info["trace"]]
        headers = {"X-Session-ID": request.match_info["trace"]}
        body = await request.json() | sampling
        async with (
            ClientSession() as client,
            client.post(f"{url}/chat/completions", json=body, headers=headers) as reply,
        ):
            return web.Response(body=await reply.read(), status=reply.status)

    async def run_episode(self, task, ctx, *, on_trace):
        episode = Episode()
        try:
            await self.run(task, Agents(Player(self, ctx, episode, on_trace)))
        except Exception as error:  # noqa: BLE001 - as the library does
            episode.errors.append(SimpleNamespace(type="EnvError", message=str(error)))
        episode.ok = not episode.errors
        return episode


def metric(function):
    function.is_metric = True
    return function


def load_taskset(config):
    return _plugin(config.id, Taskset)(config)


def load_environment(config):
    return _plugin(config.taskset.id, Env)(config)


def resolve_env_config(raw):
    taskset = _parameters(_plugin(raw["taskset"]["id"], Taskset))[1].model_validate(raw["taskset"])
    return _parameters(_plugin(taskset.id, Env))[0].model_validate({**raw, "taskset": taskset})


def _parameters(cls):
    return get_args(cls.__orig_bases__[0])


def _plugin(name, base):
    module = importlib.import_module(name)
    return next(cls for each in module.__all__ if issubclass(cls := getattr(module, each), base))
