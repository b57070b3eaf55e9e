"""What an environment answers to a call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

FailureKind = Literal["raised", "invalid", "timeout", "died", "differs"]


@dataclass(frozen=True)
class Failure:
    """Why a call has no answer.

    Attributes:
        kind: The environment's code raised, returned something invalid, took too long, or ended its process. Or, made
            again, it answered otherwise than before.
        message: What happened, and where it is known, what to do.
    """

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class Reply:
    """An environment's answer to its reset or to a step.

    Attributes:
        observations: Messages to the model.
        reward: Of this turn.
        done: Whether the trajectory ends.
        metrics: Of this turn, by name.
        role: Of the messages.
        seconds: Time spent in the call.
        failure: Why there is no answer; then all of the above but `seconds` are defaults.
        is_recorded: Whether it is from the journal, and no environment was asked.
    """

    observations: tuple[str, ...] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    role: str = "user"
    seconds: float = 0.0
    failure: Failure | None = None
    is_recorded: bool = False


class Replies(dict[int, Reply]):
    """The replies that wait to be taken, by row.

    It belongs to a pool and to its processes, and so must not refer to either: a pool that nobody uses kills them.

    Attributes:
        on_reply: Called with a row and its reply, when it comes.
    """

    on_reply: Callable[[int, Reply], None] | None = None

    def add(self, row: int, reply: Reply) -> None:
        """Add the reply to a row's call."""
        self[row] = reply
        if self.on_reply is not None:
            self.on_reply(row, reply)
