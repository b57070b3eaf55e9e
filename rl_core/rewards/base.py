"""What a reward function is, and how a failing one is recorded instead of counted as 0."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from numbers import Real
from typing import Any

Score = float | Mapping[str, float]
"""A number, or a dict that holds it as `reward` beside its parts."""

RewardFunction = Callable[[str, str, str, dict[str, Any]], Score | Awaitable[Score]]
"""`score(prompt, completion, answer, info)`, plain or async."""


@dataclass(frozen=True)
class RewardItem:
    """One response to score; the arguments of a reward function."""

    prompt: str
    completion: str
    answer: str
    info: dict[str, Any]


@dataclass(frozen=True)
class RewardOutcome:
    """A reward with its parts, or why there is none."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


def score_all(function: RewardFunction, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    """Score all items and return their outcomes in order; those of an async function run concurrently.

    A failure is an exception, or anything but a finite number or a dict of them with a `reward`. It becomes
    an outcome without a reward, and doesn't touch the other items.
    """
    return asyncio.run(_score_concurrently(function, items))


async def _score_concurrently(function: RewardFunction, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    return list(await asyncio.gather(*(_score(function, item) for item in items)))


async def _score(function: RewardFunction, item: RewardItem) -> RewardOutcome:
    try:
        score = function(item.prompt, item.completion, item.answer, item.info)
        if isawaitable(score):
            score = await score
        return _outcome(score)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it is recorded, not swallowed
        return RewardOutcome(reward=None, failure=f"{type(error).__name__}: {error}")


def _outcome(score: object) -> RewardOutcome:
    if not isinstance(score, Mapping):
        return RewardOutcome(reward=_number("the reward", score))
    if "reward" not in score:
        raise ValueError(f"the reward function's dict has no 'reward', only {sorted(map(str, score))}")
    parts = {str(name): _number(f"reward part {name!r}", part) for name, part in score.items() if name != "reward"}
    return RewardOutcome(reward=_number("the reward", score["reward"]), parts=parts)


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):  # floats, ints, bools and numpy's scalars
        raise TypeError(f"{what} is {value!r:.80}, a {type(value).__name__}; expected a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{what} is {number}; expected a finite number")
    return number
