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


class Endpoint(NamedTuple):
    """The server of the model's APIs, as it is reached on its machine."""

    url: str  # on the loopback interface, such as http://127.0.0.1:40123
    socket: str  # the path of a Unix socket, at which the same server is


class Launch(NamedTuple):
    """A program that a sandbox is to start, in the empty folder `home`, which is its HOME and TMPDIR, too."""

    command: Sequence[str]  # the program and its arguments, with the values of placeholders
    variables: Mapping[str, str]  # that it needs: the APIs' URL as it sees it, its key; not those of the run
    task: bytes  # what it reads from its standard input
    home: Path  # its grader reads here what it has left
    stdout: Path  # files for what it prints
    stderr: Path
    endpoint: Endpoint
    memory_bytes: int  # limits: its memory, a file's size, and how many files a process may have open
    file_bytes: int
    open_files: int


class Sandbox(Protocol):
    """Where one trajectory's program runs. A class of this shape is named in the config by its import path.

    It is made with the config's `arguments` as keyword arguments. Its methods run in the event loop of an environment
    process, with other trajectories', and so must not block. What they raise costs the trajectory its reward: it is a
    failure, and is never graded.
    """

    def url(self, endpoint: Endpoint) -> str:
        """Return the URL at which the program reaches the endpoint; raise an error if it can't."""
        ...

    async def start(self, launch: Launch) -> None:
        """Start the program; called once."""
        ...

    async def wait(self) -> int:
        """Wait until the program has ended, and nothing of it runs any more; return its exit code.

        A negative one is minus the number of a signal. If the sandbox has failed, not the program, raise an error.
        """
        ...

    async def kill(self) -> None:
        """Kill the program with all that it has started, if it runs, and free what the sandbox holds; called once."""
        ...


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
