"""Rewards: how a response is scored."""

import math
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from schemas.base import FrozenConfig


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}; in TOML, quote it with '...'") from None
    return pattern


def _is_part_name(name: str) -> str:
    if name == "reward":
        raise ValueError("a part can't be named 'reward', the name of the whole reward; rename it")
    return name


Pattern = Annotated[str, AfterValidator(_compiles)]
PartName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$"), AfterValidator(_is_part_name)]  # of column reward_<name>
TimeLimit = Annotated[PositiveFloat | None, AfterValidator(lambda value: None if value == math.inf else value)]


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


class FunctionReward(IsolatedReward):
    """A Python function `score(prompt, completion, answer, info) -> float | dict[str, float]`, plain or async.

    A dict must have `reward`; its other entries become `reward_<part>` columns.
    """

    kind: Literal["function"] = "function"
    """Selects a Python function."""

    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """Import path of the function, `module:function`."""


class ExactReward(InProcessReward):
    """1 if the response equals the answer, ignoring surrounding white space, else 0."""

    kind: Literal["exact"] = "exact"
    """Selects an exact match."""


class EnvironmentReward(InProcessReward):
    """The sum of the rewards that the environment gave to a trajectory's turns."""

    kind: Literal["environment"] = "environment"
    """Selects the environment's own rewards."""

    @property
    def reads_environment(self) -> bool:
        """Whether it takes the rewards that an environment gave."""
        return True


class ReasoningGymReward(IsolatedReward):
    """reasoning-gym's own verifier of the task in `data_source` (extra `demo`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Selects reasoning-gym's verifiers."""

    full_marks_only: bool = False
    """1 for the verifier's full score, else 0; false: the verifier's score, which may be partial credit."""


class NumericReward(InProcessReward):
    """1 if the last numbers of response and answer are equal within a tolerance, else 0."""

    kind: Literal["numeric"] = "numeric"
    """Selects the comparison of the last numbers."""

    relative_tolerance: NonNegativeFloat = 1e-6
    """Largest difference as a fraction of the larger number; either tolerance suffices."""

    absolute_tolerance: NonNegativeFloat = 0.0
    """Largest difference; either tolerance suffices."""


class MathReward(IsolatedReward):
    """1 if the response's final expression, LaTeX or plain, equals the answer by math-verify (extra `math`)."""

    kind: Literal["math"] = "math"
    """Selects math-verify."""


class FormatReward(IsolatedReward):
    """1 if the response matches a regular expression, else 0; or the mean over named ones. "." matches line breaks.

    It has a time limit, because an expression with backtracking may take forever.
    """

    kind: Literal["format"] = "format"
    """Selects regular expressions."""

    pattern: Pattern | None = None
    """Must match the whole response, ignoring surrounding white space; None: `parts` are used."""

    parts: dict[PartName, Pattern] = Field(default_factory=dict)
    """Patterns by name: `reward_<name>` is 1 if the pattern is found anywhere, else 0; empty: `pattern` is used."""

    @model_validator(mode="after")
    def _has_pattern_or_parts(self) -> "FormatReward":
        if (self.pattern is None) == (not self.parts):
            raise ValueError("set either pattern, for the whole response, or parts, named patterns to find in it")
        return self


class LengthReward(InProcessReward):
    """Grows linearly with the response's length, from 0 for an empty response to 1 at `target`, and stays 1."""

    kind: Literal["length"] = "length"
    """Selects the length of the response."""

    target: PositiveInt
    """Length at which the reward reaches 1, in the given unit."""

    unit: Literal["characters", "words"] = "characters"
    """Unit of the length."""


PartReward = Annotated[
    FunctionReward
    | ExactReward
    | EnvironmentReward
    | ReasoningGymReward
    | NumericReward
    | MathReward
    | FormatReward
    | LengthReward,
    Field(discriminator="kind"),
]


class WeightedPart(FrozenConfig):
    """One part of a weighted sum."""

    weight: FiniteFloat = 1.0
    """Weight in the sum; negative: a penalty; 0: only reported as a column."""

    reward: PartReward
    """The reward of this part; its time limit and processes are those of the whole sum."""

    @model_validator(mode="after")
    def _has_no_limits(self) -> "WeightedPart":
        for name in IsolatedReward.model_fields:
            if (
                name in (fields := type(self.reward).model_fields)
                and getattr(self.reward, name) != fields[name].default
            ):
                raise ValueError(f"{name} applies to the whole reward: set reward.{name}, not that of a part")
        return self


class WeightedReward(IsolatedReward):
    """The weighted sum of named rewards, each a column `reward_<name>`; their own parts are `reward_<name>_<part>`."""

    kind: Literal["weighted"] = "weighted"
    """Selects a weighted sum of rewards."""

    parts: Annotated[dict[PartName, WeightedPart], Field(min_length=1)]
    """The weighted rewards by name."""

    @property
    def needs_processes(self) -> bool:
        """Whether the reward is computed in separate processes, because a part may hang or crash."""
        return self.num_processes > 0 and any(part.reward.needs_processes for part in self.parts.values())

    @property
    def reads_environment(self) -> bool:
        """Whether a part takes the rewards that an environment gave."""
        return any(part.reward.reads_environment for part in self.parts.values())

    @model_validator(mode="after")
    def _has_nonzero_weight(self) -> "WeightedReward":
        if not any(part.weight for part in self.parts.values()):
            raise ValueError("all weights are 0, so every reward would be 0; set another weight for at least one part")
        return self


RewardConfig = Annotated[
    FunctionReward
    | ExactReward
    | EnvironmentReward
    | ReasoningGymReward
    | NumericReward
    | MathReward
    | FormatReward
    | LengthReward
    | WeightedReward,
    Field(discriminator="kind"),
]
