"""A reward for longer responses, up to a target."""

from typing import Any

from rl_core.rewards.base import RewardFunction
from schemas.config.reward import LengthReward


def load_length(config: LengthReward) -> RewardFunction:
    """Return a function that returns min(1, length / target); the length is in characters or words."""

    def score_length(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        length = len(completion.split()) if config.unit == "words" else len(completion)
        return min(1.0, length / config.target)

    return score_length
