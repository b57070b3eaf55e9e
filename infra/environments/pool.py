"""A pool of processes that hold environments: one that hangs or crashes costs its own row, not the run.

Which row's code a process runs is marked in memory that its parent reads, also after its end
(`infra.environments.child_calls.Mark`). So a loss has one known cause, even if hundreds of async calls overlap.
"""

import json
import math
import select
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from infra.environments.interpreter import find_interpreter
from infra.environments.reply import Failure, Reply
from infra.environments.slot import HeldEnvironment, Slot
from rl_core.environments.base import Task
from schemas.config.environment import TurnLimits
from schemas.errors import ConfigError

__all__ = ["EnvironmentPool", "Failure", "Reply"]


class EnvironmentPool:
    """The environment processes of one rollout worker, to be used by one thread.

    Each row's environment lives in one process. If that process hangs, or dies twice, the call whose code it ran fails.
    The process is replaced; each of its environments is made again when its next call begins, with the same task and
    seed, and its earlier actions are replayed. Other calls that were outstanding begin anew. A failed call leaves no
    trace: its environment is made again in the same way.

    Args:
        path: Import path of the class, `module:Class`.
        arguments: The class's keyword arguments, in JSON's types.
        limits: Time limits, the length of observations, the number of processes, and their interpreter.
        replays: Whether to replay actions; if not, the environments have no state.
    """

    def __init__(self, path: str, arguments: Mapping[str, Any], limits: TurnLimits, *, replays: bool = True) -> None:
        self._limits, self._replays, self._interpreter = limits, replays, find_interpreter(limits.python)
        self._settings = {
            "path": path,
            "arguments": dict(arguments),
            "module_path": self._interpreter.module_path,
            "packages": self._interpreter.packages,
            "reset_seconds": limits.reset_timeout_seconds,
            "step_seconds": limits.step_timeout_seconds,
            "max_observation_characters": limits.max_observation_characters,
        }
        self._slots: list[Slot] = []
        self._rows: dict[int, tuple[HeldEnvironment, Slot]] = {}
        self._calling: set[int] = set()  # rows with a call whose reply `wait` has not returned
        self._replies: dict[int, Reply] = {}
        self._num_opened = 0
        weakref.finalize(self, _close_all, self._slots)  # with the pool, or at the latest with this process

    def start(self) -> None:
        """Start the processes, without waiting until they have imported the class.

        Raises:
            ConfigError: The class's arguments are not in JSON's types, or their interpreter can't run here.
        """
        try:
            json.dumps(self._settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment.arguments: {error}; write them in JSON's types") from error
        self._interpreter.check()
        for _ in range(self._limits.num_processes):
            self._slots.append(Slot(self._interpreter, self._settings, self._replays, self._replies))

    def wait_until_ready(self) -> None:
        """Wait until all processes have imported the class.

        Raises:
            EnvironmentImportError: A process can't import it, or ended while importing it.
        """
        while not all(slot.process.is_ready for slot in self._slots):
            self._serve()

    def open(self, row: int, task: Task, seed: int) -> None:
        """Begin to make and reset a row's environment; an earlier one of the row must have ended.

        Args:
            row: The row.
            task: The data row, in JSON's types.
            seed: The seed.
        """
        assert self._slots, "the pool isn't started, or is closed"
        assert row not in self._rows, f"row {row} has an environment: end it first"
        slot = min(self._slots, key=lambda slot: slot.num_environments)
        self._num_opened += 1
        environment = HeldEnvironment(row, self._num_opened, task, seed)
        self._rows[row] = environment, slot
        slot.add(environment)
        try:
            json.dumps(task)
        except (TypeError, ValueError) as error:
            self._fail(row, Failure("invalid", f"the data row can't be sent to an environment process: {error}"))
        else:
            self._begin(row, None, self._limits.reset_timeout_seconds)

    def step(self, row: int, action: str) -> None:
        """Begin a step of a row's environment, once `wait` has returned the reply to its previous call."""
        self._begin(row, action, self._limits.step_timeout_seconds)

    def wait(self, rows: Collection[int] | None = None) -> dict[int, Reply]:
        """Wait until the calls of these rows have ended, or all calls; return their replies by row.

        Raises:
            EnvironmentImportError: A process that takes the place of a lost one can't import the class.
        """
        awaited = set(self._calling if rows is None else rows)
        while not awaited <= self._replies.keys():
            self._serve()
        return self._take(awaited)

    def poll(self, *, waits: bool) -> dict[int, Reply]:
        """Return the replies of calls that have ended, by row; if `waits`, wait until there is one.

        Raises:
            EnvironmentImportError: A process that takes the place of a lost one can't import the class.
        """
        self._serve(0.0)
        while waits and not self._replies:
            self._serve()
        return self._take(set(self._replies))

    def end(self, row: int) -> None:
        """Have a row's environment closed, and forget it; a call that it has begun gets no reply."""
        environment, slot = self._rows.pop(row)
        slot.remove(environment)
        self._calling.discard(row)
        self._replies.pop(row, None)

    def end_all(self) -> None:
        """End the environments of all rows; see `end`."""
        for row in list(self._rows):
            self.end(row)

    def close(self) -> None:
        """Kill all processes, and forget all environments without closing them."""
        _close_all(self._slots)
        for entries in (self._rows, self._calling, self._replies):
            entries.clear()

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [slot.process.pid for slot in self._slots]

    def _begin(self, row: int, action: str | None, limit_seconds: float) -> None:
        assert row not in self._calling, f"row {row} has a call: wait for its reply first"
        environment, slot = self._rows[row]
        total = self._limits.trajectory_timeout_seconds
        if environment.seconds >= total:
            self._fail(row, Failure("timeout", f"all calls of the trajectory together took {total:g} s or more"))
            return
        self._calling.add(row)
        slot.begin(environment, action, min(limit_seconds, total - environment.seconds))

    def _fail(self, row: int, failure: Failure) -> None:
        self._calling.add(row)
        self._replies[row] = Reply(failure=failure)

    def _take(self, rows: Collection[int]) -> dict[int, Reply]:
        self._calling.difference_update(rows)
        return {row: self._replies.pop(row) for row in sorted(rows)}

    def _serve(self, limit_seconds: float = math.inf) -> None:
        """Wait for an answer or an expired limit; record the former, and replace processes that are lost."""
        poll = select.poll()
        for slot in self._slots:
            slot.dispatch()
            poll.register(slot.process, select.POLLIN | (select.POLLOUT if slot.process.has_unsent else 0))
        poll.poll(1000 * min(limit_seconds, *(slot.seconds_to_wait() for slot in self._slots)))
        for slot in self._slots:
            slot.serve()


def _close_all(slots: list[Slot]) -> None:
    for slot in slots:
        slot.process.close()
    slots.clear()
