"""Equality of the last numbers of response and answer."""

import math
import re
from typing import Any

from rl_core.rewards.base import RewardFunction
from schemas.config.reward import NumericReward

# "1,234.5", "-.5", "2e-3"; the dash in "3-4" or "x-4" is not a sign, and "1,23" is two numbers.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?"
)


def load_numeric(config: NumericReward) -> RewardFunction:
    """Return a function that returns 1 if the last numbers of response and answer are equal, else 0.

    They are equal within the relative tolerance (of the larger one) or the absolute one. A response without a number
    is wrong; an answer without one raises ValueError, which fails the row.
    """

    def score_numeric(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        expected, found = last_number(answer), last_number(completion)
        if expected is None or not math.isfinite(expected):
            raise ValueError(
                f"the answer {answer!r:.80} has no finite last number, which reward.kind 'numeric' compares"
            )
        close = found is not None and math.isclose(
            found, expected, rel_tol=config.relative_tolerance, abs_tol=config.absolute_tolerance
        )
        return float(close)

    return score_numeric


def last_number(text: str) -> float | None:
    """Return the last decimal number in `text`, with or without commas between thousands, or None."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(numbers[-1].replace(",", "")) if numbers else None
