"""Match of the response with a format."""

import re
from typing import Any

from rl_core.rewards.base import RewardFunction
from schemas.config.reward import FormatReward


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
