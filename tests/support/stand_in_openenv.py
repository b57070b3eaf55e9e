"""What `openenv.core` 0.10 offers to an environment, and an environment made with it.

The library itself can't be installed together with vLLM.
"""

import random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Environment:
    async def step_async(self, action: Any, timeout_s: float | None = None) -> Any:
        return self.step(action, timeout_s=timeout_s)  # type: ignore[attr-defined]

    async def reset_async(self, seed: int | None = None, **arguments: Any) -> Any:
        return self.reset(seed=seed, **arguments)  # type: ignore[attr-defined]

    def close(self) -> None:
        pass


class GenericEnvClient:
    """Is not used here: it needs a server."""


class Echo(Action):
    text: str
    times: int = Field(default=1, le=3)


class Heard(Observation):
    heard: str
    left: int


class Echoing(Environment):
    def __init__(self, most: int) -> None:
        self._left = most

    def reset(self, seed: int | None = None, start: str = "ready") -> Heard:
        self._random = random.Random(seed)
        return Heard(heard=start, left=self._left)

    def step(self, action: Echo) -> Heard:
        self._left -= 1
        heard = f"{action.text * action.times} {self._random.randint(0, 9)}"
        return Heard(heard=heard, left=self._left, done=self._left == 0, reward=None if self._left else 1)


class AsyncEchoing(Echoing):
    async def step_async(self, action: Echo, timeout_s: float | None = None) -> Heard:
        return self.step(action)
