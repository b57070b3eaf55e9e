"""What a reward function returns, read as a reward with its parts, or as a failure."""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from rl_core.user_code import describe_error
from schemas.config.reward import check_part_name


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
    def timed_out(cls, timeout_seconds: float, details: str = "") -> "RewardOutcome":
        """Create the outcome of a function that didn't return in time; `details` say what it was waiting for."""
        failure = f"TimeoutError: no answer within {timeout_seconds:g} s"
        return cls(reward=None, failure="; ".join(filter(None, [failure, details])))

    @classmethod
    def failed(cls, error: BaseException) -> "RewardOutcome":
        """Create the outcome of a function that raised an error."""
        return cls(reward=None, failure=describe_error(error).removesuffix(": "))

    @classmethod
    def of(cls, score: object) -> "RewardOutcome":
        """Create the outcome of what a function has returned for one response.

        Raises:
            TypeError: It, or a part, is not a number.
            ValueError: It is not finite in float32; or it lacks its `reward`, or a part has an invalid name.
        """
        if not isinstance(score, Mapping):
            return cls(reward=finite_number("the reward", score))
        if "reward" not in score and "score" not in score:
            raise ValueError(f"the reward function's dict has no 'reward' or 'score', only {sorted(map(str, score))}")
        key = "reward" if "reward" in score else "score"
        parts: dict[str, float] = {}
        for name, value in score.items():
            if name == key or (key == "score" and (value is None or isinstance(value, str))):  # verl's `pred`
                continue
            if check_part_name(str(name)) in parts:
                raise ValueError(f"two parts are named {str(name)!r}: rename one of them")
            parts[str(name)] = finite_number(f"reward part {name!r}", value)
        return cls(reward=finite_number("the reward", score[key]), parts=parts)


def as_stored(reward: float | None) -> float | None:
    """Round a reward to the float32 of its column: what depends on it can then be computed again, bit for bit."""
    return None if reward is None else float(array("f", [reward])[0])


def finite_number(what: str, value: object) -> float:
    """Return a number of any library, such as NumPy's or torch's scalars, as a float.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not finite in float32, in which rewards are stored.
    """
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} is {value!r:.80}, a {type(value).__name__}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # what arrays of several numbers raise, and expressions without one
        raise TypeError(f"{what} is {value!r:.80}, a {type(value).__name__}; expected one number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; expected a finite number")
    if not math.isfinite(as_stored(number) or 0.0):
        raise ValueError(f"{what} is {number:g}, which is infinite in float32; expected at most 3.4e38")
    return number


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
    outcomes = [
        RewardOutcome.failed(score) if isinstance(score, Exception) else RewardOutcome.of(score) for score in each
    ]
    return RewardOutcome(reward=None, group=tuple(outcomes))
