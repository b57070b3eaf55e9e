"""Equality of mathematical expressions by math-verify (extra `math`)."""

from typing import Any

from schemas.errors import RewardImportError


def require_math_verify() -> None:
    """Import math-verify.

    Raises:
        RewardImportError: It isn't installed.
    """
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise RewardImportError(
            f"reward.kind 'math' needs the package math-verify ({error}); "
            "install it with `pip install 'sluice-rl[math]'`"
        ) from error


def score_math(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return 1 if the response's final expression equals the answer, else 0.

    math-verify finds the expression: a boxed one, the one after "the answer is", or the last one. Its own time limits
    are disabled: they would count a slow comparison as a wrong response, where `reward.timeout_seconds` records a
    failure.

    Args:
        prompt: Not used.
        completion: The response.
        answer: An expression, plain or in LaTeX with or without dollar signs.
        info: Not used.

    Raises:
        ValueError: The answer has no expression.
    """
    from math_verify import verify

    marked = any(mark in answer for mark in ("$", r"\boxed", r"\(", r"\["))
    expected = _parse(answer if marked else rf"\boxed{{{answer}}}")
    if not expected:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r:.80}")
    return float(verify(expected, _parse(completion), timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    expressions: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions
