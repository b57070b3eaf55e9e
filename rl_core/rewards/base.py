"""Reward functions, and the scoring of responses with failures recorded instead of counted as 0."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from rl_core.rewards.outcome import RewardOutcome, group_outcome
from rl_core.user_code import in_own_loop

Score = float | Mapping[str, float]
"""A number, or a dict with the number as `reward` (or, as in verl, `score`) in addition to named parts."""

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


class ManagedReward(ABC):
    """A reward function that says how its calls may overlap, and has something to do before the first."""

    is_concurrent: bool  # whether calls may overlap
    max_calls: int | None  # how many calls may overlap; None: any number

    @abstractmethod
    async def prepare(self) -> None:
        """Do what comes before the first call, once in each process.

        Raises:
            UserError: It can't be used, and the user can fix that.
        """

    @abstractmethod
    async def __call__(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> Score:
        """Return the response's score."""

    def describe_timeout(self) -> str:
        """Return what a call may have waited for that took too long; empty if that isn't known."""
        return ""


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

    def describe_timeout(self) -> str:
        return "; ".join(filter(None, (describe_timeout(function) for _, function in self._parts.values())))

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


def describe_timeout(function: AnyRewardFunction) -> str:
    """Return what a call may have waited for that took too long; empty if that isn't known."""
    return function.describe_timeout() if isinstance(function, ManagedReward) else ""


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

    Whatever it raises, or a result other than a finite number or a dict of finite numbers with a `reward`, is a
    failure: it becomes an outcome without a reward, and doesn't affect other items. A function gets a copy of `info`,
    and a plain one runs outside of the event loop.

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

    found = await asyncio.gather(
        *map(score, items), return_exceptions=True
    )  # such as that of a task that cancels itself
    return [each if isinstance(each, RewardOutcome) else RewardOutcome.failed(each) for each in found]


async def score_one(function: AnyRewardFunction, item: RewardItem) -> RewardOutcome:
    """Score one item; see `score_all`."""
    process = os.getpid()
    try:
        outcome = await _call(function, item)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, and cancel its task
        outcome = RewardOutcome.failed(error)
    if os.getpid() != process:  # a fork made by the function, which has returned here, too
        os._exit(0 if outcome.failure is None else 1)
    return outcome


async def _call(function: AnyRewardFunction, item: RewardItem) -> RewardOutcome:
    """Return what a function makes of arguments of its own, which it may change."""
    info = deepcopy(item.info | item.trajectory)
    completion: Any = item.completion if isinstance(item.completion, str) else list(item.completion)
    with nullcontext() if is_concurrent(function) else in_own_loop():
        score = function(item.prompt, completion, item.answer, info)
    if isawaitable(score):
        score = await score
    return RewardOutcome.of(score) if isinstance(completion, str) else group_outcome(score, len(item.completion))
