"""The response must be the answer."""

from typing import Any


def score_exact(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return 1 where the completion equals the answer, surrounding white space aside, else 0."""
    return float(completion.strip() == answer.strip())
