"""Built-in rewards of a few lines: exact match, format, length, reasoning-gym's verifiers, and an environment's own."""

import json
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from rl_core.rewards.base import RewardFunction
from schemas.config.reward import FormatReward, LengthReward
from schemas.errors import RewardImportError

Verifier = Callable[[str, dict[str, Any]], float]  # of reasoning-gym


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
    whole = re.compile(config.pattern or "", re.DOTALL)
    patterns = {name: re.compile(pattern, re.DOTALL) for name, pattern in config.parts.items()}

    def score_whole(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        return float(whole.fullmatch(completion.strip()) is not None)

    def score_parts(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
        found = {name: float(pattern.search(completion) is not None) for name, pattern in patterns.items()}
        return {**found, "reward": sum(found.values()) / len(found)}

    return score_whole if config.pattern is not None else score_parts


def load_length(config: LengthReward) -> RewardFunction:
    """Return a function that returns min(1, length / target); the length is in characters or words."""

    def score_length(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        length = len(completion.split()) if config.unit == "words" else len(completion)
        return min(1.0, length / config.target)

    return score_length


def require_package(package: str, kind: str, extra: str) -> None:
    """Import the package that a kind of reward needs.

    Raises:
        RewardImportError: It isn't installed.
    """
    try:
        import_module(package.replace("-", "_"))
    except ImportError as error:
        raise RewardImportError(
            f"reward.kind {kind!r} needs the package {package} ({error}); "
            f"install it with `pip install 'sluice-rl[{extra}]'`"
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
