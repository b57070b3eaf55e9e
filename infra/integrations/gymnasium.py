"""Environments of Gymnasium, played by text: `infra.integrations.gymnasium:GymnasiumEnvironment`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from rl_core.environments.base import Step, Task
from rl_core.environments.calls import without_reasoning

ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)  # whose actions are written as JSON arrays
MAX_DIGITS = 18  # of an action's number
_COLORED = re.compile(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m")  # with no other color in it
_COLORS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")  # from code 30


class GymnasiumEnvironment:
    """An environment that `gymnasium.make` makes.

    What the environment draws as text is shown, else its observation as JSON. A color that a terminal would show
    becomes a tag: `<red>F</red>`. An action is the last one that the turn names, after its reasoning: one of `actions`,
    or a number if there are none; where the environment takes a text, the whole turn; where it takes an array, a turn
    that is JSON. A turn without an action that the environment has is answered with the actions, reward 0 and the
    metric `invalid_actions`, and is no step of the environment.

    Args:
        task: The data row; the entry `reset` of its `extra_info`, if any, is the argument `options` of the reset.
        seed: The seed of the environment's reset.
        id: The environment's id, with the module that registers it if needed: `module:Name-v0`.
        options: Further keyword arguments of `gymnasium.make`.
        actions: Names of the actions 0, 1, ...
        draws: Whether the environment's drawing is shown; None: if it can draw text.

    Raises:
        TypeError: Actions of the environment can't be written as text.
        gymnasium.error.Error: The environment can't be made.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        draws: bool | None = None,
    ) -> None:
        self._seed, self._reset_options = seed, task["info"].get("reset")
        self._environment: gymnasium.Env[Any, Any] = gymnasium.make(id, **options or {})
        can_draw = "ansi" in (self._environment.metadata.get("render_modes") or ())
        self._draws = can_draw if draws is None else draws
        if self._draws:
            self._environment.close()
            self._environment = gymnasium.make(id, **{**(options or {}), "render_mode": "ansi"})
        self._space = space = self._environment.action_space
        if not isinstance(space, (spaces.Discrete, spaces.Text, *ARRAYS)):
            raise TypeError(f"actions of {id} are {space}, which have no form as text; wrap it with a TransformAction")
        if actions and not (isinstance(space, spaces.Discrete) and len(actions) == space.n):
            raise TypeError(f"the argument actions has {len(actions)} names, but actions of {id} are {space}")
        self._numbers: dict[str, int] = {}
        if isinstance(space, spaces.Discrete):
            self._numbers = {name.lower(): int(space.start) + offset for offset, name in enumerate(actions)}
        words = "|".join(sorted(map(re.escape, self._numbers), key=len, reverse=True)) or "-?[0-9]+"
        self._named = re.compile(rf"(?<!\w)(?<!\d\.)(?:{words})(?!\w|\.\d)", re.IGNORECASE)

    def reset(self) -> str:
        observation, _ = self._environment.reset(seed=self._seed, options=self._reset_options)
        return self._show(observation)

    def step(self, action: str) -> Step:
        """Take the turn's action, or say which there are if it has none."""
        value = self._parse(without_reasoning(action))
        if value is None or not self._space.contains(value):
            return Step(f"There is no valid action in it. {self._usage()}", metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self._environment.step(value)
        done = bool(terminated or truncated)
        return Step(self._show(observation), float(reward), done, {"invalid_actions": 0.0})

    def close(self) -> None:
        self._environment.close()

    def _parse(self, text: str) -> Any:
        """Return the action that a text names; None: it names none."""
        if isinstance(self._space, spaces.Text):
            return text.strip()
        if isinstance(self._space, ARRAYS):
            try:
                (value,) = self._space.from_jsonable([json.loads(text)])
            except (ValueError, TypeError, OverflowError, RecursionError):
                return None
            return value
        found = self._named.findall(text)
        if not found or not self._numbers:
            return int(found[-1]) if found and len(found[-1]) <= MAX_DIGITS else None
        return self._numbers[found[-1].lower()]

    def _usage(self) -> str:
        if isinstance(self._space, spaces.Discrete):
            first = int(self._space.start)
            numbers = f"a number from {first} to {first + int(self._space.n) - 1}"
            return f"The actions are {', '.join(self._numbers)}." if self._numbers else f"An action is {numbers}."
        return f"An action is of {self._space}" + (
            "." if isinstance(self._space, spaces.Text) else ", written as JSON."
        )

    def _show(self, observation: Any) -> str:
        if self._draws:
            text, found = str(self._environment.render()), 1
            while found:
                text, found = _COLORED.subn(_tagged, text)
            return text.strip("\n")
        return observation if isinstance(observation, str) else json.dumps(_json(observation), ensure_ascii=False)


def _tagged(found: re.Match[str]) -> str:
    """Return a colored text between tags with the color's name."""
    codes = [int(code) for code in found[1].split(";") if code]
    colors = [_COLORS[code % 10] for code in codes if 30 <= code <= 48 and code % 10 < len(_COLORS)]
    return f"<{colors[0]}>{found[2]}</{colors[0]}>" if colors else found[2]


def _json(value: Any) -> Any:
    """Return an observation in JSON's types."""
    if isinstance(value, Mapping):
        return {str(name): _json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # NumPy's arrays and scalars
