"""How a response is scored."""

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

from schemas.base import Frozen


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}; in TOML, quote it with '...'") from None
    return pattern


def _is_no_part(name: str) -> str:
    if name == "reward":
        raise ValueError("a part can't be named 'reward': that is the whole; rename it")
    return name


Pattern = Annotated[str, AfterValidator(_compiles)]
PartName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$"), AfterValidator(_is_no_part)]  # of column reward_<name>
TimeLimit = Annotated[PositiveFloat | None, AfterValidator(lambda value: None if value == math.inf else value)]


class InProcessReward(Frozen):
    """The base of rewards that always end, and soon: the rollout worker computes them itself."""

    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5  # more failures in one step stop the run

    @property
    def needs_processes(self) -> bool:
        """Whether processes of their own compute it."""
        return False


class IsolatedReward(InProcessReward):
    """The base of rewards that may hang or crash: processes of their own compute them, and are replaced."""

    timeout_seconds: TimeLimit = 30.0  # per response; inf or None: no limit
    num_processes: NonNegativeInt = 2  # per rollout worker; 0: the rollout worker itself, without a limit

    @property
    def needs_processes(self) -> bool:
        return self.num_processes > 0

    @model_validator(mode="after")
    def _limit_can_be_kept(self) -> "IsolatedReward":
        if self.num_processes == 0 and self.timeout_seconds is not None:
            raise ValueError(
                f"timeout_seconds = {self.timeout_seconds:g} needs num_processes of at least 1: only a process can be "
                "ended; raise it, or set timeout_seconds = inf"
            )
        return self


class FunctionReward(IsolatedReward):
    """A Python function `score(prompt, completion, answer, info) -> float | dict[str, float]`, plain or async.

    A dict must hold `reward`; its other entries become `reward_<part>` columns.
    """

    kind: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # "module:function"


class ExactReward(InProcessReward):
    """1 where the response equals the answer, surrounding white space aside, else 0."""

    kind: Literal["exact"] = "exact"


class ReasoningGymReward(IsolatedReward):
    """reasoning-gym's own verifier of the task that `data_source` names (extra `demo`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    full_marks_only: bool = False  # 1 for the verifier's full score, else 0, instead of its partial credit


class NumericReward(InProcessReward):
    """1 where the response's last number is the answer's last number, within a tolerance, else 0."""

    kind: Literal["numeric"] = "numeric"
    relative_tolerance: NonNegativeFloat = 1e-6  # of the larger of the two
    absolute_tolerance: NonNegativeFloat = 0.0  # either will do


class MathReward(IsolatedReward):
    """1 where the response's final expression, LaTeX or plain, equals the answer by math-verify (extra `math`)."""

    kind: Literal["math"] = "math"


class FormatReward(IsolatedReward):
    """How well the response keeps a format: one regular expression, or the mean over named ones. "." is any character.

    A backtracking expression may take forever, so it has a time limit.
    """

    kind: Literal["format"] = "format"
    pattern: Pattern | None = None  # the whole response must match it, surrounding white space aside
    parts: dict[PartName, Pattern] = Field(default_factory=dict)  # found somewhere: 1 in `reward_<name>`, else 0

    @model_validator(mode="after")
    def _has_one_of_both(self) -> "FormatReward":
        if (self.pattern is None) == (not self.parts):
            raise ValueError("give one of pattern, for the whole response, and parts, named patterns to be found in it")
        return self


class LengthReward(InProcessReward):
    """Grows linearly with the response's length, from 0 for an empty one to 1 at `target`, and stays 1."""

    kind: Literal["length"] = "length"
    target: PositiveInt
    unit: Literal["characters", "words"] = "characters"


PartReward = Annotated[
    FunctionReward | ExactReward | ReasoningGymReward | NumericReward | MathReward | FormatReward | LengthReward,
    Field(discriminator="kind"),
]


class WeightedPart(Frozen):
    """One part of a sum."""

    weight: FiniteFloat = 1.0  # negative: a penalty; 0: only its column
    reward: PartReward

    @model_validator(mode="after")
    def _has_no_limits(self) -> "WeightedPart":
        for name in IsolatedReward.model_fields:
            if (
                name in (fields := type(self.reward).model_fields)
                and getattr(self.reward, name) != fields[name].default
            ):
                raise ValueError(f"{name} is of the whole reward: set reward.{name}, not that of a part")
        return self


class WeightedReward(IsolatedReward):
    """The weighted sum of named rewards, each a column `reward_<name>`; its own parts are `reward_<name>_<part>`."""

    kind: Literal["weighted"] = "weighted"
    parts: Annotated[dict[PartName, WeightedPart], Field(min_length=1)]

    @property
    def needs_processes(self) -> bool:
        """Whether processes of their own compute it: not where all parts are quick."""
        return self.num_processes > 0 and any(part.reward.needs_processes for part in self.parts.values())

    @model_validator(mode="after")
    def _weighs_something(self) -> "WeightedReward":
        if not any(part.weight for part in self.parts.values()):
            raise ValueError("all weights are 0: every reward would be 0; give at least one part another weight")
        return self


RewardConfig = Annotated[
    FunctionReward
    | ExactReward
    | ReasoningGymReward
    | NumericReward
    | MathReward
    | FormatReward
    | LengthReward
    | WeightedReward,
    Field(discriminator="kind"),
]
