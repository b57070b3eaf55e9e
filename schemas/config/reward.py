"""Rewards: how a response is scored."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from schemas.base import FrozenConfig
from schemas.config.judge import JudgeReward
from schemas.config.kinds import ImportPath
from schemas.config.reward_base import InProcessReward, IsolatedReward, Pattern

RESERVED = ("reward", "failed")  # `reward/failed` counts failed rewards

_NAME = re.compile(r"\w[\w.-]*")


def check_part_name(name: str) -> str:
    """Return the name of a reward part, if it can be that of a column and a metric.

    Raises:
        ValueError: It is empty or reserved, or has other characters than letters and digits of any alphabet, "_", "-"
            and ".".
    """
    if name in RESERVED:
        raise ValueError(f"a part can't be named {name!r}, the name of the whole reward or of its failures; rename it")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a part can't be named {name!a:.80}; use letters, digits, '_', '-' and '.', and begin with none of the "
            "last two"
        )
    return name


PartName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$"), AfterValidator(check_part_name)]


class FunctionReward(IsolatedReward):
    """A Python function `score(prompt, completion, answer, info) -> float | dict[str, float]`, plain or async.

    A dict must have `reward`; its other entries become `reward_<part>` columns.
    """

    kind: Literal["function"] = "function"

    path: ImportPath
    """Import path of the function, `module:function`."""


class GroupFunctionReward(IsolatedReward):
    """A Python function `score(prompt, completions, answer, info) -> list[float | dict[str, float]]`, plain or async.

    It scores all responses to a prompt at once, such as by rank. A time limit, and a failure, is that of all of them.
    """

    kind: Literal["group_function"] = "group_function"

    path: ImportPath
    """Import path of the function, `module:function`."""


class ExactReward(InProcessReward):
    """1 if the response equals the answer, ignoring surrounding white space, else 0."""

    kind: Literal["exact"] = "exact"


class EnvironmentReward(InProcessReward):
    """The sum of the rewards that the environment gave to a trajectory's turns."""

    kind: Literal["environment"] = "environment"

    @property
    def reads_environment(self) -> bool:
        """Whether it takes the rewards that an environment gave."""
        return True

    @property
    def environment_weight(self) -> float:
        """The factor of the environment's rewards in this one."""
        return 1.0


class ReasoningGymReward(IsolatedReward):
    """reasoning-gym's own verifier of the task in `data_source` (extra `reasoning-gym`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"

    full_marks_only: bool = False
    """1 for the verifier's full score, else 0; false: the verifier's score, which may be partial credit."""


class ModelReward(InProcessReward):
    """The score of a reward model: a folder for sequence classification with one label, on the run's reward workers."""

    kind: Literal["model"] = "model"

    path: Annotated[str, Field(min_length=1)]
    """Folder or hub id of the model, in safetensors, and of its tokenizer with a chat template."""

    num_workers: PositiveInt = 1
    """Reward workers, each with the model, and a GPU if there are some."""

    max_tokens: PositiveInt = 4096
    """Longest prompt and response together in tokens; the reward of a longer one fails."""

    token_budget: PositiveInt = 16384
    """Most tokens of a packed row, which holds responses to one prompt; more need more memory."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations; auto: bfloat16 on CUDA, float32 on a CPU."""

    def dtype_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """Return the compute dtype on a kind of device, `cpu` or `cuda`."""
        if self.compute_dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.compute_dtype

    @model_validator(mode="after")
    def _longest_fits_a_row(self) -> "ModelReward":
        if self.max_tokens > self.token_budget:
            raise ValueError(
                f"token_budget = {self.token_budget} is less than max_tokens = {self.max_tokens}, so that the longest "
                "response would fit no row; raise it"
            )
        return self


class NumericReward(InProcessReward):
    """1 if the final numbers of response and answer are equal within a tolerance, else 0.

    The final number is the one in the last box, or after the last `####`, or the last one. Numbers that belong
    together, such as a time, a pair or an unevaluated expression, are compared together.
    """

    kind: Literal["numeric"] = "numeric"

    relative_tolerance: NonNegativeFloat | None = None
    """Largest difference as a fraction of the larger number; None: 1e-6, but 0 for whole ones. Either one suffices."""

    absolute_tolerance: NonNegativeFloat = 0.0
    """Largest difference; either tolerance suffices."""


class MathReward(IsolatedReward):
    """1 if the response's final expression, LaTeX or plain, equals the answer by math-verify (extra `math`)."""

    kind: Literal["math"] = "math"


class FormatReward(IsolatedReward):
    """1 if the response matches a regular expression, else 0; or the mean over named ones. "." matches line breaks.

    It has a time limit, because an expression with backtracking may take forever.
    """

    kind: Literal["format"] = "format"

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

    target: PositiveInt
    """Length at which the reward reaches 1, in the given unit."""

    unit: Literal["characters", "words"] = "characters"
    """Unit of the length."""


_OfOneResponse = (
    FunctionReward
    | JudgeReward
    | ModelReward
    | ExactReward
    | EnvironmentReward
    | ReasoningGymReward
    | NumericReward
    | MathReward
    | FormatReward
    | LengthReward
)


def _refuse_judge_model(reward: Any) -> Any:
    if isinstance(reward, dict) and reward.get("kind") == "judge_model":
        raise ValueError(
            'kind = "judge_model" was removed (the Sluice that wrote them reads runs that have it); serve the judge, '
            f'as by `vllm serve {reward.get("path", "PATH")}`, and set kind = "judge" with url and model '
            "(docs/rewards.md)"
        )
    return reward


_Refusal = BeforeValidator(_refuse_judge_model)
PartReward = Annotated[_OfOneResponse, Field(discriminator="kind"), _Refusal]


class WeightedPart(FrozenConfig):
    """One part of a weighted sum."""

    weight: float = 1.0
    """Weight in the sum; negative: a penalty; 0: only reported as a column."""

    reward: PartReward
    """The reward of this part; its time limit and processes are those of the whole sum."""

    @field_validator("reward", mode="before")
    @classmethod
    def _scores_one_response(cls, reward: Any) -> Any:
        if isinstance(reward, GroupFunctionReward) or (
            isinstance(reward, dict) and reward.get("kind") == "group_function"
        ):
            raise ValueError(
                "a group function can't be a part of a sum, whose parts score one response each; compute the sum in "
                'the function and set reward.kind = "group_function"'
            )
        return reward

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

    @property
    def environment_weight(self) -> float:
        """The factor of the environment's rewards in this one."""
        return sum(part.weight * part.reward.environment_weight for part in self.parts.values())

    @model_validator(mode="after")
    def _has_nonzero_weight(self) -> "WeightedReward":
        if not any(part.weight for part in self.parts.values()):
            raise ValueError("all weights are 0, so every reward would be 0; set another weight for at least one part")
        return self


RewardConfig = Annotated[_OfOneResponse | GroupFunctionReward | WeightedReward, Field(discriminator="kind"), _Refusal]


def parts_of(reward: InProcessReward) -> list[Any]:
    """Return the rewards of a weighted sum, or a reward itself."""
    return [part.reward for part in reward.parts.values()] if isinstance(reward, WeightedReward) else [reward]


def reward_models(reward: InProcessReward) -> tuple[ModelReward, ...]:
    """Return the reward models of a reward: itself or its parts, which are computed on workers of their own."""
    return tuple(each for each in parts_of(reward) if isinstance(each, ModelReward))


def user_functions(reward: InProcessReward) -> list[FunctionReward | GroupFunctionReward]:
    """Return the users' functions of a reward, itself or parts of it."""
    return [part for part in parts_of(reward) if isinstance(part, FunctionReward | GroupFunctionReward)]
