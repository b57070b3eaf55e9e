"""A pool of processes that hold environments: one that hangs or crashes costs its own row, not the run."""

import json
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.environments.interpreter import Interpreter, find_interpreter
from infra.environments.slot import ALL_CALLS, EnvironmentSlot, Failure, HeldEnvironment, Replies, Reply
from infra.processes.slot import close_all, serve, wait_until_ready
from rl_core.environments.base import Task
from schemas.config.environment import TurnLimits
from schemas.errors import ConfigError

__all__ = ["EnvironmentClass", "EnvironmentPool", "Failure", "Reply"]


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of which a pool makes environments."""

    path: str  # its import path, `module:Class`
    limits: TurnLimits  # time limits, the length of observations, the number of processes, and their interpreter
    arguments: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments, in JSON's types


class EnvironmentPool:
    """The environment processes of one rollout worker, to be used by one thread.

    Each row's environment lives in one process. If that process hangs, or dies twice, the call whose code it ran fails.
    The process is replaced; each of its environments is made again when its next call begins, with the same task and
    seed, and its earlier actions are replayed. Other calls that were outstanding start again. A failed call leaves no
    trace: its environment is made again in the same way.

    Args:
        classes: The classes of its environments; each has processes of its own.

    Attributes:
        replies: Those that have not been returned yet; its `on_reply` is called as soon as this thread notices one.
    """

    def __init__(self, *classes: EnvironmentClass) -> None:
        self._classes = classes
        self._slots: list[EnvironmentSlot] = []  # all processes
        self._slots_by_class: list[list[EnvironmentSlot]] = []
        self._rows: dict[int, tuple[HeldEnvironment, EnvironmentSlot]] = {}
        self._calling: set[int] = set()  # rows with a call whose reply `wait` has not returned
        self.replies = Replies()
        self._num_opened = 0
        weakref.finalize(self, close_all, self._slots)  # with the pool, or at the latest with this process

    def start(self) -> None:
        """Start the processes, without waiting until they have imported the class.

        Raises:
            ConfigError: A class's arguments are not in JSON's types, or their interpreter can't run here.
        """
        for made in self._classes:
            interpreter = find_interpreter(made.limits.python)
            settings = _settings_of(made, interpreter)
            interpreter.check()
            own: list[EnvironmentSlot] = []
            self._slots_by_class.append(own)
            for _ in range(made.limits.num_processes):
                own.append(EnvironmentSlot(interpreter, settings, self.replies))
                self._slots.append(own[-1])

    def wait_until_ready(self) -> None:
        """Wait until all processes have imported the class.

        Raises:
            EnvironmentImportError: A process can't import it, or ended while importing it.
        """
        wait_until_ready(self._slots)

    def open(self, row: int, task: Task, seed: int, number: int = 0) -> None:
        """Begin to make and reset a row's environment; an earlier one of the row must have ended.

        Args:
            row: The row.
            task: The data row, in JSON's types.
            seed: The seed.
            number: The number of its class among the pool's.
        """
        environment = self._hold(row, task, seed, number)
        try:
            json.dumps(task)
        except (TypeError, ValueError) as error:
            self._fail(row, Failure("invalid", f"the data row can't be sent to an environment process: {error}"))
        else:
            self._begin(row, None, environment.limits.reset_timeout_seconds)

    def open_again(
        self, row: int, task: Task, seed: int, number: int, replies: Sequence[Reply], actions: Sequence[str]
    ) -> None:
        """Hold the environment of a row that another pool has held; it is made when its next step begins.

        Its past is then replayed, if it keeps state. If it answers otherwise than before, the step fails as `differs`.

        Args:
            row: The row.
            task: The data row.
            seed: The seed.
            number: The number of its class among the pool's.
            replies: What it answered to its reset, and to each of A actions: A + 1.
            actions: The actions.
        """
        environment = self._hold(row, task, seed, number)
        environment.history.extend(actions)
        environment.expected = [reply.as_message(is_reset=at == 0) for at, reply in enumerate(replies)]
        environment.is_recorded = True
        environment.seconds = sum(reply.seconds for reply in replies)

    def step(self, row: int, action: str) -> None:
        """Begin a step of a row's environment, once `wait` has returned the reply to its previous call."""
        self._begin(row, action, self._rows[row][0].limits.step_timeout_seconds)

    def wait(self, rows: Collection[int] | None = None) -> dict[int, Reply]:
        """Wait until the calls of these rows have ended, or all calls; return their replies by row.

        Raises:
            EnvironmentImportError: A process that takes the place of a lost one can't import the class.
        """
        awaited = set(self._calling if rows is None else rows)
        while not awaited <= self.replies.keys():
            serve(self._slots)
        return self._take(awaited)

    def poll(self, *, waits: bool) -> dict[int, Reply]:
        """Return the replies of calls that have ended, by row; if `waits`, wait until there is one.

        Raises:
            EnvironmentImportError: A process that takes the place of a lost one can't import the class.
        """
        serve(self._slots, 0.0)
        while waits and not self.replies:
            serve(self._slots)
        return self._take(set(self.replies))

    def receive(self) -> None:
        """Notice what has been answered, and leave it to be taken by `wait` or `poll`.

        Raises:
            EnvironmentImportError: A process that takes the place of a lost one can't import the class.
        """
        serve(self._slots, 0.0)

    def end(self, row: int) -> None:
        """Have a row's environment closed, and forget it; a call that it has begun gets no reply."""
        environment, slot = self._rows.pop(row)
        slot.remove(environment)
        self._calling.discard(row)
        self.replies.pop(row, None)

    def end_all(self) -> None:
        """End the environments of all rows; see `end`."""
        for row in list(self._rows):
            self.end(row)

    def close(self) -> None:
        """Kill all processes, and forget all environments without closing them."""
        close_all(self._slots)
        self._slots_by_class.clear()
        self.replies.on_reply = None
        for entries in (self._rows, self._calling, self.replies):
            entries.clear()

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [slot.process.pid for slot in self._slots]

    def _hold(self, row: int, task: Task, seed: int, number: int) -> HeldEnvironment:
        assert self._slots, "the pool isn't started, or is closed"
        assert row not in self._rows, f"row {row} has an environment: end it first"
        slot = min(self._slots_by_class[number], key=lambda slot: slot.num_environments)
        limits = self._classes[number].limits
        self._num_opened += 1
        environment = HeldEnvironment(number=self._num_opened, row=row, task=task, seed=seed, limits=limits)
        self._rows[row] = environment, slot
        slot.add(environment)
        return environment

    def _begin(self, row: int, action: str | None, limit_seconds: float) -> None:
        assert row not in self._calling, f"row {row} has a call: wait for its reply first"
        environment, slot = self._rows[row]
        total = environment.limits.trajectory_timeout_seconds
        if environment.seconds >= total:
            self._fail(row, Failure("timeout", f"{ALL_CALLS} {total:g} s or more"))
            return
        self._calling.add(row)
        slot.begin(environment, action, min(limit_seconds, total - environment.seconds))

    def _fail(self, row: int, failure: Failure) -> None:
        self._calling.add(row)
        self.replies.add(row, Reply(failure=failure))

    def _take(self, rows: Collection[int]) -> dict[int, Reply]:
        self._calling.difference_update(rows)
        return {row: self.replies.pop(row) for row in sorted(rows)}


def _settings_of(made: EnvironmentClass, interpreter: Interpreter) -> dict[str, Any]:
    """Return the settings of a class's processes, see `infra.environments.child`."""
    settings = {
        "path": made.path,
        "arguments": dict(made.arguments),
        "module_path": interpreter.module_path,
        "packages": interpreter.packages,
        "reset_seconds": made.limits.reset_timeout_seconds,
        "step_seconds": made.limits.step_timeout_seconds,
        "max_observation_characters": made.limits.max_observation_characters,
    }
    try:
        json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment.arguments: {error}; write them in JSON's types") from error
    return settings
