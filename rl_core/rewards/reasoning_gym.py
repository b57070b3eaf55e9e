"""reasoning-gym's own verifiers (extra `demo`)."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from schemas.errors import RewardImportError

Verifier = Callable[[str, dict[str, Any]], float]


def require_reasoning_gym() -> None:
    """Import reasoning-gym.

    Raises:
        RewardImportError: It isn't installed.
    """
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise RewardImportError(
            f"reward.kind 'reasoning_gym' needs the package reasoning-gym ({error}); "
            "install it with `pip install 'sluice-rl[demo]'`"
        ) from error


def score_reasoning_gym(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return the score, 0 to 1, of the verifier of the task that `info["data_source"]` names.

    Args:
        prompt: The question, unless `info` holds a `question`.
        completion: The response; surrounding white space is ignored.
        answer: The entry's answer.
        info: Must hold `data_source`, a task's name (a prefix up to "/" is ignored), and `metadata`, the metadata of
            reasoning-gym's entry as an object or JSON.

    Raises:
        KeyError: `info` has no `metadata`.
        ValueError: reasoning-gym has no such task.
    """
    metadata = info["metadata"]
    entry = {
        "question": info.get("question", prompt),
        "answer": answer,
        "metadata": json.loads(metadata) if isinstance(metadata, str) else metadata,
    }
    return float(_verifier(info["data_source"].rpartition("/")[2])(completion.strip(), entry))


def score_full_marks(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return 1 if `score_reasoning_gym` returns the full score, else 0."""
    return float(score_reasoning_gym(prompt, completion, answer, info) == 1.0)


@cache
def _verifier(task: str) -> Verifier:
    from reasoning_gym import get_score_answer_fn

    verifier: Verifier = get_score_answer_fn(task)
    return verifier
