"""Rewards: `load_reward`, `score_one`, `score_all`; a new one is a config class, a module and a line in `LOADERS`."""

from collections.abc import Callable
from typing import Any

from rl_core.registry import Registry, entry
from rl_core.rewards.base import (
    AnyRewardFunction,
    GroupFunction,
    RewardFunction,
    RewardItem,
    WeightedSum,
    describe_timeout,
    is_concurrent,
    prepare,
    score_all,
    score_concurrently,
    score_one,
    turns_of,
)
from rl_core.rewards.built_in import (
    load_format,
    load_length,
    require_package,
    score_environment,
    score_exact,
    score_full_marks,
    score_reasoning_gym,
)
from rl_core.rewards.math import load_math, mark_answer
from rl_core.rewards.numeric import load_numeric
from rl_core.rewards.outcome import RewardOutcome, as_stored, group_outcome
from rl_core.user_code import import_user_module
from schemas.config.judge import JudgeReward
from schemas.config.reward import (
    EnvironmentReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    GroupFunctionReward,
    LengthReward,
    MathReward,
    ModelReward,
    NumericReward,
    ReasoningGymReward,
    RewardConfig,
    WeightedReward,
)
from schemas.errors import RewardImportError

__all__ = [
    "LOADERS",
    "RESPONSES",
    "AnyRewardFunction",
    "Respond",
    "RewardItem",
    "RewardOutcome",
    "as_stored",
    "describe_timeout",
    "group_outcome",
    "is_concurrent",
    "load_reward",
    "prepare",
    "score_all",
    "score_concurrently",
    "score_one",
    "turns_of",
]


def load_reward(config: RewardConfig) -> AnyRewardFunction:
    """Return the reward function of the config's `kind`.

    Raises:
        RewardImportError: Its module can't be imported or has no such function, or a required package is missing.
    """
    return LOADERS(config)


def _load_function(config: FunctionReward) -> RewardFunction:
    return _import(config.path, "score(prompt, completion, answer, info) -> float")  # type: ignore[no-any-return]


def _load_group_function(config: GroupFunctionReward) -> GroupFunction:
    signature = "score(prompt, completions, answer, info) -> list[float]"
    return _import(config.path, signature)  # type: ignore[no-any-return]


def _load_judge(config: JudgeReward) -> RewardFunction:
    from rl_core.rewards.judge import Judge  # only then, because it imports httpx

    return Judge(config)


def _load_model(config: ModelReward) -> AnyRewardFunction:
    from rl_core.rewards.model import RewardModel  # only then, because it imports transformers

    return RewardModel(config)


def _import(path: str, signature: str) -> Any:
    module, name = import_user_module("reward.path", path, RewardImportError)
    function = getattr(module, name, None)
    if not callable(function):
        found = "is not a function" if hasattr(module, name) else "has no such function"
        raise RewardImportError(
            f"reward.path {path!r}: {getattr(module, '__file__', None) or module.__name__} {found} {name!r}; "
            f"define `def {signature}` there and name it after the colon"
        )
    return function


def _load_reasoning_gym(config: ReasoningGymReward) -> RewardFunction:
    require_package("reasoning-gym", "reasoning_gym", "reasoning-gym")
    return score_full_marks if config.full_marks_only else score_reasoning_gym


def _load_weighted(config: WeightedReward) -> RewardFunction:
    return WeightedSum({name: (part.weight, load_reward(part.reward)) for name, part in config.parts.items()})


LOADERS: Registry[[], AnyRewardFunction] = Registry(
    "rl_core.rewards.LOADERS",
    RewardConfig,
    entry(FunctionReward, _load_function),
    entry(JudgeReward, _load_judge),
    entry(ModelReward, _load_model),
    entry(ExactReward, lambda _: score_exact),
    entry(EnvironmentReward, lambda _: score_environment),
    entry(ReasoningGymReward, _load_reasoning_gym),
    entry(NumericReward, load_numeric),
    entry(MathReward, load_math),
    entry(FormatReward, load_format),
    entry(LengthReward, load_length),
    entry(GroupFunctionReward, _load_group_function),
    entry(WeightedReward, _load_weighted),
)
"""Loaders of reward functions: (config) -> function."""

Respond = Callable[[str], str]  # answer -> a response that gives it
_NOT_COMPARED: Respond | None = None

RESPONSES: Registry[[], Respond | None] = Registry(
    "rl_core.rewards.RESPONSES",
    RewardConfig,
    entry(FunctionReward, lambda _: _NOT_COMPARED),
    entry(JudgeReward, lambda _: _NOT_COMPARED),
    entry(ModelReward, lambda _: _NOT_COMPARED),
    entry(ExactReward, lambda _: str),
    entry(EnvironmentReward, lambda _: _NOT_COMPARED),
    entry(ReasoningGymReward, lambda _: str),
    entry(NumericReward, lambda _: str),
    entry(MathReward, lambda _: mark_answer),
    entry(FormatReward, lambda _: _NOT_COMPARED),
    entry(LengthReward, lambda _: _NOT_COMPARED),
    entry(GroupFunctionReward, lambda _: _NOT_COMPARED),
    entry(WeightedReward, lambda _: _NOT_COMPARED),  # its parts are
)
"""How a response gives an answer to each kind of reward; None of those that compare no response with the answer."""
