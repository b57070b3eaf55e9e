"""Reward functions, and the scoring of responses with failures recorded instead of counted as 0."""

import asyncio
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import isawaitable, iscoroutinefunction
from numbers import Real
from typing import Any

from rl_core.user_code import describe_error

Score = float | Mapping[str, float]
"""A number, or a dict with the number as `reward` in addition to named parts."""

RewardFunction = Callable[[str, str, str, dict[str, Any]], Score | Awaitable[Score]]
"""`score(prompt, completion, answer, info)`, plain or async."""

GroupScores = Sequence[Score | Exception]
"""One score for each response to a prompt, in order; an exception is the failure of its response alone."""

GroupFunction = Callable[[str, list[str], str, dict[str, Any]], GroupScores | Awaitable[GroupScores]]
"""`score(prompt, completions, answer, info)`, plain or async."""

AnyRewardFunction = RewardFunction | GroupFunction


@dataclass(frozen=True)
class RewardItem:
    """One response to score, or all those to a prompt; the arguments of a reward function."""

    prompt: str
    completion: str | list[str]  # a list for a group function
    answer: str
    info: dict[str, Any]
    trajectory: dict[str, Any] = field(default_factory=dict)  # what `info` has besides, of several turns


@dataclass(frozen=True)
class RewardOutcome:
    """A reward with its parts, or the failure.

    The outcome of a group function has no reward of its own: it is a failure, or the outcomes of all responses.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    group: "tuple[RewardOutcome, ...]" = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RewardOutcome":
        """Create the outcome of which `values` are the fields, after a round trip through JSON."""
        return cls(**{**values, "group": tuple(map(cls.from_json, values["group"]))})

    @classmethod
    def timed_out(cls, timeout_seconds: float) -> "RewardOutcome":
        """Create the outcome of a function that didn't return in time."""
        return cls(reward=None, failure=f"TimeoutError: no answer within {timeout_seconds:g} s")


def as_stored(reward: float | None) -> float | None:
    """Round a reward to the float32 of its column: what depends on it can then be computed again, bit for bit."""
    return None if reward is None else float(array("f", [reward])[0])


class ManagedReward(ABC):
    """A reward function that says how its calls may overlap, and has something to do before the first.

    Attributes:
        is_concurrent: Whether calls may overlap.
        max_calls: How many calls may overlap; None: any number.
    """

    is_concurrent: bool
    max_calls: int | None

    @abstractmethod
    async def prepare(self) -> None:
        """Do what comes before the first call, once in each process.

        Raises:
            UserError: It can't be used, and the user can fix that.
        """

    @abstractmethod
    async def __call__(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> Score:
        """Return the response's score."""


class WeightedSum(ManagedReward):
    """The weighted sum of named reward functions, itself a reward function.

    Its parts are the unweighted rewards of the functions, by name; the parts of function `a` are added as `a_<part>`.

    Args:
        parts: Weight and function by name.
    """

    def __init__(self, parts: Mapping[str, tuple[float, AnyRewardFunction]]) -> None:
        self._parts = dict(parts)
        functions = [function for _, function in parts.values()]
        self.is_concurrent = any(is_concurrent(function) for function in functions)
        self.max_calls = min((limit for limit in map(max_calls, functions) if limit is not None), default=None)

    async def prepare(self) -> None:
        """Prepare the parts."""
        for _, function in self._parts.values():
            await prepare(function)

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


def is_concurrent(function: AnyRewardFunction) -> bool:
    """Return whether calls may overlap, because the function or one of its parts is async."""
    if isinstance(function, ManagedReward):
        return function.is_concurrent
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def max_calls(function: AnyRewardFunction) -> int | None:
    """Return how many calls may overlap, if they may; None: any number."""
    return function.max_calls if isinstance(function, ManagedReward) else None


async def prepare(function: AnyRewardFunction) -> None:
    """Do what a function needs before its first call in this process.

    Raises:
        UserError: It can't be used, such as a judge that doesn't respond.
    """
    if isinstance(function, ManagedReward):
        await function.prepare()


def turns_of(function: AnyRewardFunction) -> AbstractAsyncContextManager[object]:
    """Return what each call of an event loop enters, so that no more of them overlap than may."""
    limit = max_calls(function)
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


def score_all(function: AnyRewardFunction, items: Sequence[RewardItem]) -> list[RewardOutcome]:
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
    return asyncio.run(score_concurrently(function, items))


async def score_concurrently(function: AnyRewardFunction, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    """Do what `score_all` does, in an event loop that runs."""
    turns = turns_of(function)

    async def score(item: RewardItem) -> RewardOutcome:
        async with turns:
            return await score_one(function, item)

    return list(await asyncio.gather(*map(score, items)))


async def score_one(
    function: AnyRewardFunction, item: RewardItem, timeout_seconds: float | None = None
) -> RewardOutcome:
    """Score one item; see `score_all`.

    Args:
        function: The reward function.
        item: Its arguments.
        timeout_seconds: The time limit of an async function; one that computes without awaiting can't be interrupted.
    """
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            info = item.info | item.trajectory
            score = function(item.prompt, item.completion, item.answer, info)  # type: ignore[arg-type]
            if isawaitable(score):
                score = await score
        return _outcome(score) if isinstance(item.completion, str) else group_outcome(score, len(item.completion))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
        if limit.expired():
            assert timeout_seconds is not None
            return RewardOutcome.timed_out(timeout_seconds)
        return RewardOutcome(reward=None, failure=describe_error(error))


def _outcome(score: object) -> RewardOutcome:
    if not isinstance(score, Mapping):
        return RewardOutcome(reward=_number("the reward", score))
    if "reward" not in score:
        raise ValueError(f"the reward function's dict has no 'reward', only {sorted(map(str, score))}")
    parts = {str(name): _number(f"reward part {name!r}", part) for name, part in score.items() if name != "reward"}
    return RewardOutcome(reward=_number("the reward", score["reward"]), parts=parts)


def group_outcome(scores: object, num_responses: int) -> RewardOutcome:
    """Return the outcome of what a group function has returned for so many responses.

    Raises:
        TypeError: It, or a score, is of a wrong type.
        ValueError: There are fewer or more scores, or one is not finite or lacks its `reward`.
    """
    if isinstance(scores, Mapping | str) or not isinstance(scores, Iterable):
        raise TypeError(
            f"the group function returned {scores!r:.80}, a {type(scores).__name__}; expected a list of "
            f"{num_responses} scores"
        )
    if len(each := list(scores)) != num_responses:
        raise ValueError(f"the group function returned {len(each)} scores for {num_responses} responses")
    return RewardOutcome(reward=None, group=tuple(map(_outcome_in_group, each)))


def _outcome_in_group(score: object) -> RewardOutcome:
    return RewardOutcome(None, failure=describe_error(score)) if isinstance(score, Exception) else _outcome(score)


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):  # floats, ints, bools and numpy's scalars
        raise TypeError(f"{what} is {value!r:.80}, a {type(value).__name__}; expected a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{what} is {number}; expected a finite number")
    return number
