"""The rewards that an environment gave."""

from typing import Any


def score_environment(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return the sum of the rewards of a trajectory's turns."""
    return float(info["environment_reward"])
