"""Equality of mathematical expressions by math-verify (extra `math`)."""

import logging
import re
from decimal import Decimal
from typing import Any

from rl_core.rewards.base import RewardFunction
from rl_core.rewards.built_in import require_package
from rl_core.rewards.notation import plain_notation
from schemas.config.reward import MathReward

MAX_ZEROS = 30  # of a number that is written out
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.]\w|\w)")
_DOLLARS = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\$\$")  # around an expression; one alone is a currency


def load_math(_: MathReward) -> RewardFunction:
    """Return `score_math`.

    Raises:
        RewardImportError: math-verify isn't installed.
    """
    require_package("math-verify", "math", "math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each process that it has no time limit
    return score_math


def score_math(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return 1 if the response's final expression equals the answer, else 0.

    math-verify finds the expression: a boxed one, the one after "the answer is", or the last one. Before, numbers are
    written as `plain_notation` says, so that percent signs and currencies are units. Its own time limits are disabled:
    they would count a slow comparison as a wrong response, where `reward.timeout_seconds` records a failure.

    Args:
        prompt: Not used.
        completion: The response.
        answer: An expression, plain or in LaTeX with or without dollar signs.
        info: Not used.

    Raises:
        ValueError: The answer has no expression.
    """
    from math_verify import verify

    gold = _as_latex(answer)
    expected = _parse(gold if _is_marked(gold) else rf"\boxed{{{gold}}}")
    if not expected:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r:.80}")
    return float(verify(expected, _parse(_as_latex(completion)), timeout_seconds=None, raise_on_error=True))


def mark_answer(answer: str) -> str:
    """Return the answer as a response gives it: in a box, unless it is marked as an expression."""
    return answer if _is_marked(answer) else rf"\boxed{{{answer}}}"


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in (r"\boxed", r"\(", r"\[")) or _DOLLARS.search(text) is not None


def _as_latex(text: str) -> str:
    return _SCIENTIFIC.sub(_decimal, plain_notation(text))


def _decimal(found: re.Match[str]) -> str:
    if abs(int(found[2])) > MAX_ZEROS:
        return rf"{found[1]} \times 10^{{{int(found[2])}}}"
    return f"{Decimal(found[0]):f}"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    expressions: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions
