"""Exact match of response and answer."""

from typing import Any


def score_exact(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return 1 if the completion equals the answer, ignoring surrounding white space, else 0."""
    return float(completion.strip() == answer.strip())
