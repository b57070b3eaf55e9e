"""The protocol of environments, which answer a model's turns."""

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict


class Task(TypedDict):
    """A data row, from which an environment is made."""

    prompt: list[dict[str, str]]  # the chat, each message with `role` and `content`
    answer: str
    info: dict[str, Any]  # `extra_info` and `data_source`


class Step(NamedTuple):
    """What an environment answers to a turn; a plain tuple of its first three fields will do.

    >>> Step("too low")
    Step(observation='too low', reward=0.0, done=False, metrics={})
    """

    observation: str | Sequence[str] | Mapping[str, Any]  # the next message to the model, or several, or a branch
    # (`Environment.step`); nobody reads it if `done`
    reward: float = 0.0  # of this turn
    done: bool = False  # whether the trajectory ends
    metrics: Mapping[str, float] = {}  # by name; summed over a trajectory, and averaged over trajectories


class FinishedProgram(NamedTuple):
    """A program that has ended, as its grader sees it."""

    task: Task
    messages: list[dict[str, Any]]  # its newest chat, as OpenAI writes it, the model's turns without reasoning
    folder: Path  # the program's own, as it left it
    exit_code: int  # negative: minus the number of the signal that ended it
    output: str  # the end of what it printed
    chats: Sequence[list[dict[str, Any]]] = ()  # all that no later one extends, the newest one last


class Environment(Protocol):
    """One trajectory's world. A class of this shape is named in the config by its import path.

    It is made from a data row and a seed, with the config's `arguments` as keyword arguments: `Game(task, seed, n=7)`.
    All samples of a prompt have the same seed. Its methods may be plain or async. It runs in a separate process, in
    which others may run, too, and is made again, with the same calls, if that process is lost: so it should depend on
    nothing but its task, its seed and the actions.

    Attributes:
        role: The role of its messages in the chat template; optional, "user" if absent.
        keeps_state: Whether an answer depends on the calls before it; optional, True if absent. If not, as with a
            search, it is made again without those calls, and may answer the same call otherwise the next time.
    """

    role: str
    keeps_state: bool

    def reset(self) -> str | Awaitable[str | None] | None:
        """Begin the trajectory; return a message to add to the prompt, or None if the data row has all of it.

        A dict of `messages`, each with `role` and `content`, and `tools`, JSON schemas, takes the place of the data
        row's prompt.
        """
        ...

    def step(self, action: str) -> Step | tuple[str, float, bool] | Awaitable[Step | tuple[str, float, bool]]:
        """Answer the model's turn, given as text with its special tokens, but without the one that ended it.

        The trajectory branches if the observation is a dict: with `observation`, one or several texts, and `after`, the
        number of an earlier turn, from 1 on, they follow that one. With `messages`, as of a reset, and `tools` (those
        of the reset don't count for it), the next turn is asked for with another chat, such as one with a summary of
        what was; it has in common with an earlier chat the tokens that both begin with.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what it holds, when its trajectory has ended; optional."""
        ...
