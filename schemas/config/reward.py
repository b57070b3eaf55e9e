"""How a response is scored."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Frozen


class FunctionReward(Frozen):
    """A Python function `score(prompt, completion, answer, info) -> float | dict[str, float]`.

    A dict must hold `reward`; its other entries become `reward_<part>` columns.
    """

    kind: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # "module:function"
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5  # more failures in one step stop the run


class ExactReward(Frozen):
    """1 where the response equals the answer, surrounding white space aside, else 0."""

    kind: Literal["exact"] = "exact"
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5


class ReasoningGymReward(Frozen):
    """reasoning-gym's own verifier of the task that `data_source` names (extra `demo`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    full_marks_only: bool = False  # 1 for the verifier's full score, else 0, instead of its partial credit
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5


RewardConfig = Annotated[FunctionReward | ExactReward | ReasoningGymReward, Field(discriminator="kind")]
