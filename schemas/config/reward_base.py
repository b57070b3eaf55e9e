"""What all rewards have in common: limits, and types of their settings."""

import math
import re
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from schemas.base import FrozenConfig


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}; in TOML, quote it with '...'") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
TimeLimit = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=True)] | None,
    AfterValidator(lambda value: None if value == math.inf else value),
]


class InProcessReward(FrozenConfig):
    """The base of rewards that always end quickly, and are computed in the rollout worker's process."""

    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops if a larger fraction of a step's rewards fails, or all of them."""

    @property
    def needs_processes(self) -> bool:
        """Whether the reward is computed in separate processes."""
        return False

    @property
    def reads_environment(self) -> bool:
        """Whether it takes the rewards that an environment gave."""
        return False

    @property
    def environment_weight(self) -> float:
        """The factor of the environment's rewards in this one."""
        return 0.0


class IsolatedReward(InProcessReward):
    """The base of rewards that may hang or crash, and are computed in separate processes, which are replaced."""

    timeout_seconds: TimeLimit = 30.0
    """Time limit per response, in seconds; inf or None: no limit."""

    num_processes: NonNegativeInt = 2
    """Reward processes per rollout worker; 0: computed in the rollout worker's process, without a time limit."""

    @property
    def needs_processes(self) -> bool:
        """Whether the reward is computed in separate processes."""
        return self.num_processes > 0

    @model_validator(mode="after")
    def _can_enforce_limit(self) -> "IsolatedReward":
        if self.num_processes == 0 and self.timeout_seconds is not None:
            raise ValueError(
                f"timeout_seconds = {self.timeout_seconds:g} needs num_processes of at least 1, as only a separate "
                "process can be killed; raise it, or set timeout_seconds = inf"
            )
        return self
