"""Environments of OpenEnv: `infra.integrations.openenv:OpenEnvEnvironment` and `OpenEnvServer`.

The first one runs in the environment process, the second one on a server that it asks.
"""

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from openenv.core import Environment, GenericEnvClient
from pydantic import ValidationError

from rl_core.environments.base import Step, Task
from rl_core.environments.calls import without_reasoning

RESULTS = ("done", "reward", "metadata")  # of an observation; the model sees its other fields


class InvalidActionError(Exception):
    """A turn is no action; the message is for the model."""


class _Texts:
    """Actions from a model's text, and observations for it.

    Args:
        action_field: The action's field that the turn becomes; None: the turn is a JSON object of all fields.
        observation_field: The observation's field that the model sees; None: it sees a JSON object of all fields.
    """

    def __init__(self, action_field: str | None, observation_field: str | None) -> None:
        self._action_field, self._observation_field = action_field, observation_field

    def action(self, turn: str) -> dict[str, Any]:
        """Return the fields of a turn's action."""
        text = without_reasoning(turn).strip()
        if self._action_field is not None:
            return {self._action_field: text}
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidActionError(f"The action is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InvalidActionError("The action must be a JSON object.")
        return fields

    def step(self, fields: Mapping[str, Any], reward: float | None, done: bool) -> Step:
        """Return what an observation says."""
        return Step(self.observation(fields), float(reward or 0.0), bool(done), {"invalid_actions": 0.0})

    def observation(self, fields: Mapping[str, Any]) -> str:
        """Return the text of an observation's fields."""
        if self._observation_field is None:
            shown = {name: value for name, value in fields.items() if name not in RESULTS}
            return json.dumps(shown, ensure_ascii=False)
        if self._observation_field not in fields:
            raise KeyError(
                f"the argument observation_field is {self._observation_field!r}, but the observation has "
                f"{', '.join(fields)}"
            )
        value = fields[self._observation_field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _invalid(error: object) -> Step:
    return Step(f"The action is invalid. {error}", metrics={"invalid_actions": 1.0})


class OpenEnvEnvironment:
    """An `openenv.core.Environment` in this process, without a server.

    An action that its class refuses is answered with why, reward 0 and the metric `invalid_actions`, and is no step.

    Args:
        task: The data row; the entry `reset` of its `extra_info`, if any, has further arguments of the reset.
        seed: The seed of the environment's reset.
        environment: Import path of the environment's class, `module:Class`.
        action: Import path of the class of its actions.
        arguments: Keyword arguments of the environment's class.
        action_field: The action's field that the turn becomes; None: the turn is a JSON object of all fields.
        observation_field: The observation's field that the model sees; None: it sees a JSON object of all fields.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        environment: str,
        action: str,
        arguments: Mapping[str, Any] | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
    ) -> None:
        self._reset_arguments = {"seed": seed, **(task["info"].get("reset") or {})}
        self._texts = _Texts(action_field, observation_field)
        self._action_class = _class(action)
        self._environment = _class(environment)(**arguments or {})

    async def reset(self) -> str:
        method = self._method("reset")
        taken = inspect.signature(method).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            arguments = self._reset_arguments
        else:
            arguments = {name: value for name, value in self._reset_arguments.items() if name in taken}
        observation = method(**arguments)
        if inspect.isawaitable(observation):
            observation = await observation
        return self._texts.observation(observation.model_dump(mode="json"))

    async def step(self, action: str) -> Step:
        """Take the turn as an action, or say why it is none."""
        try:
            fields = self._texts.action(action)
        except InvalidActionError as error:
            return _invalid(error)
        try:
            value = self._action_class.model_validate(fields)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
            return _invalid("; ".join(problems))
        observation = self._method("step")(value)
        if inspect.isawaitable(observation):
            observation = await observation
        return self._texts.step(observation.model_dump(mode="json"), observation.reward, observation.done)

    def close(self) -> None:
        self._environment.close()

    def _method(self, name: str) -> Any:
        """Return the environment's own method, async if it has defined that one.

        The async one that it inherits calls the plain one, with arguments that this may not take.
        """
        own = f"{name}_async"
        is_own = getattr(type(self._environment), own) is not getattr(Environment, own)
        return getattr(self._environment, own if is_own else name)


class OpenEnvServer:
    """A session of an OpenEnv server, by WebSocket; the package `openenv` is needed here, the environment's is not.

    An action that the server refuses is answered with why, reward 0 and the metric `invalid_actions`.

    Args:
        task: The data row; the entry `reset` of its `extra_info`, if any, has further arguments of the reset.
        seed: The seed of the environment's reset.
        url: The server's URL, `http://host:port`.
        action_field: The action's field that the turn becomes; None: the turn is a JSON object of all fields.
        observation_field: The observation's field that the model sees; None: it sees a JSON object of all fields.
        options: Further keyword arguments of `openenv.core.GenericEnvClient`, such as `message_timeout_s`.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        url: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._reset_arguments = {"seed": seed, **(task["info"].get("reset") or {})}
        self._texts = _Texts(action_field, observation_field)
        self._client = GenericEnvClient(base_url=url, **options or {})

    async def reset(self) -> str:
        """Open the session and begin; return what is to be seen."""
        await self._client.connect()
        result = await self._client.reset(**self._reset_arguments)
        return self._texts.observation(result.observation)

    async def step(self, action: str) -> Step:
        """Send the turn as an action, or say why it is none."""
        try:
            result = await self._client.step(self._texts.action(action))
        except InvalidActionError as error:
            return _invalid(error)
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" in str(error):
                return _invalid(error)
            raise
        return self._texts.step(result.observation, result.reward, result.done)

    async def close(self) -> None:
        await self._client.close()


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
