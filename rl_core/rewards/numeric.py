"""Equality of the final numbers of response and answer."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rl_core.boxed import last_boxed
from rl_core.rewards.base import RewardFunction
from rl_core.rewards.notation import find_change, plain_notation
from schemas.config.reward import NumericReward

DEFAULT_TOLERANCE = 1e-6
MARK = "####"  # of GSM8K, before the final answer

# "1,234.5", "-.5", "2e-3"; the dash in "3-4" or "x-4" is not a sign, and "1,23" is two numbers.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([-+]?[\d.,]+)\s*\}|(\d)\s*(\d))")
_EXPONENT = re.compile(r"[\^_]\{?\Z|(?<![A-Za-z])(?:mm|cm|dm|m|km|in|ft|yd|mi)\Z")  # before the 2 of x_2, m^2 and cm2
_OPERATOR = r"[/:.^*+\-_×÷·]|\\times|\\cdot|\\div|\^\{"
_JOINED = re.compile(rf"\s*/\s*|(?:{_OPERATOR})|\s+(?:{_OPERATOR})\s+")
_SAME = {"\\times": "*", "\\cdot": "*", "×": "*", "·": "*", "\\div": "/", "÷": "/", "^{": "^"}
_OPENING, _CLOSING = re.compile(r"[(\[{]\s*\Z"), re.compile(r"\s*[)\]}]")
_LISTED = re.compile(r"\s*[,;]\s*(?:and\s+)?|\s+and\s+")


@dataclass(frozen=True)
class Quantity:
    """A number; or numbers that belong together, such as a time, a date, a pair, or an unevaluated expression."""

    numbers: tuple[float, ...]  # their values
    joints: tuple[str, ...] = ()  # what stands between them, one fewer

    def equals(self, other: "Quantity", relative: float | None, absolute: float) -> bool:
        """Return whether each number is within one of the tolerances of the other's, and all are joined alike."""
        return self.joints == other.joints and all(
            _close(own, others, relative, absolute) for own, others in zip(self.numbers, other.numbers, strict=True)
        )


def load_numeric(config: NumericReward) -> RewardFunction:
    """Return a function that returns 1 if the final numbers of response and answer are equal, else 0.

    They are equal within the relative tolerance (of the larger one) or the absolute one. A response without a number
    is wrong; an answer without one, or with several that don't belong together, raises ValueError, which fails the row.
    """

    def score_numeric(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
        expected = expected_quantity(answer)
        found = last_quantity(completion, lists="," in expected.joints)
        tolerances = config.relative_tolerance, config.absolute_tolerance
        return float(found is not None and found.equals(expected, *tolerances))

    return score_numeric


def expected_quantity(answer: str) -> Quantity:
    """Return the quantity that an answer gives.

    Raises:
        ValueError: It has none, one that is not finite, several, or something that changes its value.
    """
    text = _final_part(answer)
    found = _quantities(text, lists=True)
    if not found or not all(map(math.isfinite, found[-1].numbers)):
        raise ValueError(f"the answer {answer!r:.80} has no finite number, which reward.kind 'numeric' compares")
    if len(found) > 1:
        raise ValueError(
            f"the answer {answer!r:.80} has {len(found)} numbers, of which reward.kind 'numeric' could compare only "
            f"the last: write the final one alone, or after {MARK}, or take reward.kind 'math' or 'exact'"
        )
    if change := find_change(_plain_fractions(text)):
        raise ValueError(
            f"the answer {answer!r:.80} is more than a number: reward.kind 'numeric' would compare "
            f"{' and '.join(f'{number:g}' for number in found[0].numbers)} and ignore {change!r:.40}; take reward.kind "
            "'math' or 'exact', or write its value as a number"
        )
    return found[0]


def last_quantity(text: str, *, lists: bool = False) -> Quantity | None:
    r"""Return the quantity in the last `\\boxed{}`, else after the last `####`, else the last one; None: there is none.

    Args:
        text: The text.
        lists: Whether commas join numbers that are not in brackets.
    """
    found = _quantities(_final_part(text), lists=lists)
    return found[-1] if found else None


def _final_part(text: str) -> str:
    text = plain_notation(text)
    boxed = last_boxed(text)
    return text.rpartition(MARK)[2] if boxed is None else boxed


def _plain_fractions(text: str) -> str:
    return _FRACTION.sub(lambda found: "/".join(filter(None, found.groups())), text)


def _quantities(text: str, *, lists: bool) -> list[Quantity]:
    """Return all quantities of a text, in order."""
    text = _plain_fractions(text)
    groups: list[list[re.Match[str]]] = []  # numbers that are joined, except by commas
    for match in _NUMBER.finditer(text):
        if groups and _joint(text, groups[-1][-1], match):
            groups[-1].append(match)
        elif not _EXPONENT.search(text, max(match.start() - 3, 0), match.start()):
            groups.append([match])
    return [_quantity(text, each) for each in _join_lists(text, groups, lists)]


def _join_lists(text: str, groups: list[list[re.Match[str]]], lists: bool) -> Iterator[list[list[re.Match[str]]]]:
    """Yield each list of groups that commas join: in brackets, or anywhere with `lists`; the others alone."""
    runs: list[list[list[re.Match[str]]]] = []
    for group in groups:
        if runs and _LISTED.fullmatch(text, runs[-1][-1][-1].end(), group[0].start()):
            runs[-1].append(group)
        else:
            runs.append([group])
    for run in runs:
        if lists or (
            _OPENING.search(text, max(run[0][0].start() - 9, 0), run[0][0].start())
            and _CLOSING.match(text, run[-1][-1].end())
        ):
            yield run
        else:
            yield from ([group] for group in run)


def _quantity(text: str, items: list[list[re.Match[str]]]) -> Quantity:
    numbers: list[float] = []
    joints: list[str] = []
    for item in items:
        own = [float(each[0].replace(",", "")) for each in item]
        within = [_joint(text, left, right) for left, right in pairwise(item)]
        if within == ["/"] and own[1]:
            own, within = [own[0] / own[1]], []
        numbers += own
        joints += [*within, ","]
    return Quantity(tuple(numbers), tuple(joints[:-1]))


def _joint(text: str, left: re.Match[str], right: re.Match[str]) -> str:
    """Return what joins two numbers, or nothing."""
    if not (found := _JOINED.fullmatch(text, left.end(), right.start())):
        return ""
    operator = found[0].strip()
    return _SAME.get(operator, operator)


def _close(own: float, other: float, relative: float | None, absolute: float) -> bool:
    if relative is None:  # whole numbers are exact
        relative = 0.0 if own.is_integer() and other.is_integer() else DEFAULT_TOLERANCE
    return math.isclose(own, other, rel_tol=relative, abs_tol=absolute)
