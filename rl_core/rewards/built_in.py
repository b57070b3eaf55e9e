"""Built-in rewards of a few lines: exact match, format, length, and what an environment gave."""

import re
from typing import Any

from rl_core.rewards.base import RewardFunction
from schemas.config.reward import FormatReward, LengthReward


def score_exact(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return 1 if the completion equals the answer, ignoring surrounding white space, else 0."""
    return float(completion.strip() == answer.strip())


def score_environment(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return the sum of the rewards of a trajectory's turns."""
    return float(info["environment_reward"])


def load_format(config: FormatReward) -> RewardFunction:
    """Return a function that returns 1 if the whole response matches `pattern`, else 0; or the mean over `parts`.

    Each of `parts` is 1 if its pattern is found in the response, else 0. "." matches line breaks too.
    """
    if config.pattern is not None:
        return _whole(re.compile(config.pattern, re.DOTALL))
    return _parts({name: re.compile(pattern, re.DOTALL) for name, pattern in config.parts.items()})


def _whole(pattern: re.Pattern[str]) -> RewardFunction:
    def score_whole(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        return float(pattern.fullmatch(completion.strip()) is not None)

    return score_whole


def _parts(patterns: dict[str, re.Pattern[str]]) -> RewardFunction:
    def score_parts(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
        found = {name: float(pattern.search(completion) is not None) for name, pattern in patterns.items()}
        return {**found, "reward": sum(found.values()) / len(found)}

    return score_parts


def load_length(config: LengthReward) -> RewardFunction:
    """Return a function that returns min(1, length / target); the length is in characters or words."""

    def score_length(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        length = len(completion.split()) if config.unit == "words" else len(completion)
        return min(1.0, length / config.target)

    return score_length
