"""Reward functions, and the scoring of responses with failures recorded instead of counted as 0."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable, iscoroutinefunction
from numbers import Real
from typing import Any

Score = float | Mapping[str, float]
"""A number, or a dict with the number as `reward` in addition to named parts."""

RewardFunction = Callable[[str, str, str, dict[str, Any]], Score | Awaitable[Score]]
"""`score(prompt, completion, answer, info)`, plain or async."""

MAX_FAILURE_CHARACTERS = 1000  # of a failure's message, which is logged and sent to the driver


@dataclass(frozen=True)
class RewardItem:
    """One response to score; the arguments of a reward function."""

    prompt: str
    completion: str
    answer: str
    info: dict[str, Any]


@dataclass(frozen=True)
class RewardOutcome:
    """A reward with its parts, or the failure."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    @classmethod
    def timed_out(cls, timeout_seconds: float) -> "RewardOutcome":
        """Create the outcome of a function that didn't return in time."""
        return cls(reward=None, failure=f"TimeoutError: no answer within {timeout_seconds:g} s")


class WeightedSum:
    """The weighted sum of named reward functions, itself a reward function.

    Its parts are the unweighted rewards of the functions, by name; the parts of function `a` are added as `a_<part>`.

    Args:
        parts: Weight and function by name.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._parts = dict(parts)
        self.is_concurrent = any(is_concurrent(function) for _, function in parts.values())

    async def __call__(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
        """Return the sum as `reward`, and its parts.

        Raises:
            RuntimeError: A part failed, so that the sum is unknown.
        """
        item, total = RewardItem(prompt, completion, answer, info), 0.0
        scores: dict[str, float] = {}
        for name, (weight, function) in self._parts.items():
            outcome = await score_one(function, item)
            if outcome.reward is None:
                raise RuntimeError(f"part {name!r} failed: {outcome.failure}")
            total += weight * outcome.reward
            for key, value in {name: outcome.reward, **{f"{name}_{k}": v for k, v in outcome.parts.items()}}.items():
                if key in scores:
                    raise RuntimeError(f"two parts are named {key!r}: rename one of them")
                scores[key] = value
        return {"reward": total, **scores}


def is_concurrent(function: RewardFunction) -> bool:
    """Return whether calls may overlap, because the function or one of its parts is async."""
    if isinstance(function, WeightedSum):
        return function.is_concurrent
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def score_all(function: RewardFunction, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    """Score all items and return their outcomes in order; an async function is called concurrently.

    An exception, or a result other than a finite number or a dict of finite numbers with a `reward`, is a failure: it
    becomes an outcome without a reward, and doesn't affect other items.

    Example:
        >>> def score(prompt, completion, answer, info):
        ...     return {"reward": float(int(completion) == int(answer)), "brevity": 1 / len(completion)}
        >>> items = [RewardItem("2 + 2 =", completion, "4", {}) for completion in ("4", "four")]
        >>> first, second = score_all(score, items)
        >>> first.reward, first.parts
        (1.0, {'brevity': 1.0})
        >>> second.reward, second.failure
        (None, "ValueError: invalid literal for int() with base 10: 'four'")
    """
    return asyncio.run(_score_concurrently(function, items))


async def score_one(function: RewardFunction, item: RewardItem, timeout_seconds: float | None = None) -> RewardOutcome:
    """Score one item; see `score_all`.

    Args:
        function: The reward function.
        item: Its arguments.
        timeout_seconds: The time limit of an async function; one that computes without awaiting can't be interrupted.
    """
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            score = function(item.prompt, item.completion, item.answer, item.info)
            if isawaitable(score):
                score = await score
        return _outcome(score)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
        if limit.expired():
            assert timeout_seconds is not None
            return RewardOutcome.timed_out(timeout_seconds)
        return RewardOutcome(reward=None, failure=_describe(error))


async def _score_concurrently(function: RewardFunction, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    return list(await asyncio.gather(*(score_one(function, item) for item in items)))


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


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the __str__ of a user's exception may raise anything
        text = f"{type(error).__name__}, whose message can't be formatted"
    return text.encode(errors="replace").decode()[:MAX_FAILURE_CHARACTERS]
