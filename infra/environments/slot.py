"""One process of a pool, with its environments and their answers; if it is lost, another one takes its place."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import infra.environments.child
import infra.processes.calls
import infra.processes.lifeline
import infra.processes.threads
import rl_core.user_code
import schemas.errors
from infra.environments.interpreter import Interpreter
from infra.processes.calls import Running
from infra.processes.isolated import IsolatedProcess
from infra.processes.slot import MAX_HUNG, LossKind, ProcessCall, Slot
from rl_core.environments.base import Task
from schemas.config.environment import TurnLimits
from schemas.errors import EnvironmentImportError

MODULES = (
    schemas.errors,
    rl_core.user_code,
    infra.processes.lifeline,
    infra.processes.calls,
    infra.processes.threads,
    infra.environments.child,
)
# Loads the modules by their files: no package of Sluice is on the module path of its interpreter. Nor is the current
# folder, which `-P` would not add either, but only in Python 3.11 and later. They are forgotten again, as packages that
# an environment imports would lack them.
PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, json
names = json.loads(sys.argv[3])
for name, file in names:
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
for name, file in names:
    del sys.modules[name]
module.main(int(sys.argv[1]), int(sys.argv[2]))
"""
_MADE_OF = ("task", "seed", "history", "expected", "is_recorded")
FailureKind = Literal["raised", "invalid", "timeout", "died", "differs"]
MAX_LATE = 3  # attempts at making an environment again that take too long
CLOSE_SECONDS, CLOSE_POLL_SECONDS = 10.0, 0.05  # for environments of a process that is replaced to be closed
ALL_CALLS = "all calls of the trajectory together took"  # begins the message of a time-out of the trajectory
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a call has no answer."""

    # The environment's code raised, returned something invalid, took too long, or ended its process. Or, made
    # again, it answered otherwise than before.
    kind: FailureKind
    message: str  # what happened, and where it is known, what to do


@dataclass(frozen=True)
class Reply:
    """An environment's answer to its reset or to a step."""

    observations: tuple[str, ...] = ()  # messages to the model
    reward: float = 0.0  # of this turn
    done: bool = False  # whether the trajectory ends
    metrics: Mapping[str, float] = field(default_factory=dict)  # of this turn, by name
    role: str = "user"  # of the messages otherwise, and of those to come
    seconds: float = 0.0  # time spent in the call
    failure: Failure | None = None  # why there is no answer; then all others but `seconds` and `requests` are defaults
    is_recorded: bool = False  # whether it is from the journal, and no environment was asked
    # Of the messages, if they are a whole chat: of a reset, it takes the place of the data row's prompt; of a
    # step, the trajectory goes on from the longest beginning that its tokens share with an earlier chat.
    roles: tuple[str, ...] = ()
    extras: str = ""  # JSON of what else the messages of a whole chat have, such as calls of tools; empty: nothing
    tools: str = ""  # JSON of the tools that then belong to it; empty: none
    after: int = 0  # the number of the turn, from 1 on, that the messages follow; 0: the newest
    sampling: str = ""  # JSON of a `TurnSampling`, what they say of the next turn; empty: nothing
    # Of an environment that asks its model itself: how many requests came to each API since its last answer, how
    # many of them were `repeated` or `refused`, and the `seconds` from the one that this call answered to its
    # turn. Measurements, which may differ when the call is repeated.
    requests: Mapping[str, float] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages, as chat templates take them."""
        roles = self.roles or [self.role] * len(self.observations)
        extras = json.loads(self.extras) if self.extras else [{}] * len(roles)
        return [
            {"role": role, "content": text, **others}
            for role, text, others in zip(roles, self.observations, extras, strict=True)
        ]

    @property
    def news(self) -> tuple[str, ...]:
        """The texts of the messages, of a whole chat those after the model's last one."""
        last = max((at for at, role in enumerate(self.roles, start=1) if role == "assistant"), default=0)
        return self.observations[last:]

    def as_message(self, *, is_reset: bool) -> dict[str, Any]:
        """Return it as its environment's process sent it, without its time and counts of requests."""
        message: dict[str, Any] = {"observations": list(self.observations), "role": self.role}
        if self.roles:
            message["roles"] = list(self.roles)
        message |= {name: value for name in ("extras", "tools", "after", "sampling") if (value := getattr(self, name))}
        if not is_reset:
            message |= {"reward": self.reward, "done": self.done, "metrics": dict(self.metrics)}
        return message


class Replies(dict[int, Reply]):
    """The replies that wait to be taken, by row.

    It belongs to a pool and to its processes, and so must not refer to either: a pool that nobody uses kills them.
    """

    on_reply: Callable[[int, Reply], None] | None = None  # called with a row and its reply, when it comes

    def add(self, row: int, reply: Reply) -> None:
        """Add the reply to a row's call."""
        self[row] = reply
        if self.on_reply is not None:
            self.on_reply(row, reply)


@dataclass(eq=False, kw_only=True)
class HeldEnvironment(ProcessCall):
    """A row's environment, from `open` to `end`, and its outstanding call."""

    row: int  # the row
    task: Task  # the data row
    seed: int  # the seed
    limits: TurnLimits  # the time limits of its calls
    history: list[str] = field(default_factory=list)  # the actions that its state depends on
    seconds: float = 0.0  # time spent in all of its calls
    # What it answered to the reset and to `history`, in JSON's types: made again, it must answer the same.
    expected: list[dict[str, Any]] = field(default_factory=list)
    is_recorded: bool = False  # whether that is from the journal, and it has not answered so itself
    is_made: bool = False  # whether its process holds it, in the state after its latest successful call
    num_late: int = 0  # how often its outstanding call has ended as making it again took too long
    action: str | None = None  # the action of its outstanding call; None: it is reset
    limit_seconds: float = 0.0  # the time limit of its outstanding call


class EnvironmentSlot(Slot[HeldEnvironment]):
    """A process, or its replacement, and the environments that it holds.

    Args:
        interpreter: What runs the process.
        settings: The process's; see `infra.environments.child`.
        replies: Takes each reply.
    """

    kind, loading, load_error = "environment", "imported the class", EnvironmentImportError

    def __init__(self, interpreter: Interpreter, settings: Mapping[str, Any], replies: Replies) -> None:
        modules = json.dumps([(module.__name__, module.__file__) for module in MODULES])
        command, first = [interpreter.python, "-c", PROGRAM], json.dumps(settings).encode()
        start = partial(IsolatedProcess, command, [modules], first, interpreter.variables)
        super().__init__(settings["path"], start, deque())
        self._replies = replies
        self._environments: dict[int, HeldEnvironment] = {}  # by number
        self._has_warned, self._num_closing = False, 0

    @property
    def num_environments(self) -> int:
        return len(self._environments)

    def add(self, environment: HeldEnvironment) -> None:
        """Take an environment, which is made when its first call begins.

        Between batches, when it holds none, a process with too many hung threads is replaced whatever its class keeps.
        """
        if not self._environments and self.num_hung >= MAX_HUNG:
            self._wait_for_closes()
            self._give_up()
        self._environments[environment.number] = environment

    def begin(self, environment: HeldEnvironment, action: str | None, limit_seconds: float) -> None:
        """Begin a call of an environment that has none."""
        environment.action, environment.limit_seconds = action, limit_seconds
        self._waiting.append(environment)
        self.take()

    def remove(self, environment: HeldEnvironment) -> None:
        """Close and forget an environment, and its call if it has one."""
        del self._environments[environment.number]
        self.sent.pop(environment.number, None)
        if environment in self._waiting:
            self._waiting.remove(environment)
        self._num_closing += 1
        self.process.send(json.dumps({"number": environment.number, "close": True}).encode())

    def _wait_for_closes(self) -> None:
        """Let environments that are being closed end; what hangs is given up after a while."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._num_closing > 0 and self._loss() is None and time.monotonic() < deadline:
            self.process.flush()
            self._record(self.process.receive())
            time.sleep(CLOSE_POLL_SECONDS)

    def serve(self) -> None:
        """Record answers, and replace the process if it is lost, or has too many hung threads and no calls.

        Raises:
            EnvironmentImportError: The process can't import the class, or ended while importing it.
        """
        super().serve()
        if not self.sent and not self._has_room():
            self._give_up()

    def _give_up(self) -> None:
        logger.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "environment process %d of %s is replaced: %d calls that timed out still run in threads of it; give "
            "what they wait for a time limit below environment.step_timeout_seconds",
            self.process.pid,
            self._name,
            self.num_hung,
        )
        self._has_warned = True
        self.restart()

    def restart(self) -> None:
        """Start another process, in which the environments are made again when their next calls begin."""
        super().restart()
        self._num_closing = 0
        for environment in self._environments.values():
            environment.is_made = False

    def _has_room(self) -> bool:
        """Return whether the process takes another call; with too many hung threads, it is to be replaced.

        Environments that keep state, or are to be closed, are not given up for that.
        """
        ready = self.process.ready
        return self.num_hung < MAX_HUNG or ready is None or not ready["is_disposable"]

    def _message(self, call: HeldEnvironment) -> bytes:
        message: dict[str, Any] = {"number": call.number, "seconds": call.limit_seconds, "action": call.action}
        if not call.is_made:
            message["make"] = {name: getattr(call, name) for name in _MADE_OF}
            call.is_made = True
        return json.dumps(message).encode()

    def _answer(self, call: HeldEnvironment | None, answer: dict[str, Any]) -> None:
        if call is None:
            self._num_closing -= answer.get("closed", 0)
            return
        if answer.get("kind") == "late":
            self._fail_again(call, "timeout", answer["failure"], answer["seconds"])
        elif "failure" in answer:
            failure, requests = Failure(answer["kind"], answer["failure"]), answer.get("requests", {})
            self._reply(call, Reply(seconds=answer["seconds"], failure=failure, requests=requests))
        else:
            texts = {name: tuple(answer.get(name, ())) for name in ("observations", "roles")}
            self._reply(call, Reply(**answer | texts))

    def _fail(self, call: HeldEnvironment, kind: LossKind, message: str, running: Running, now: float) -> None:
        seconds = min(max(0.0, now - running.deadline + running.limit_seconds), running.limit_seconds)
        if running.is_remade:
            self._fail_again(call, kind, f"when it was made again: {message}", seconds)
        else:
            self._reply(call, Reply(seconds=seconds, failure=Failure(kind, message)))

    def _fail_again(self, call: HeldEnvironment, kind: LossKind, message: str, seconds: float) -> None:
        """Note that an environment could not be made again; one that was too slow for it has further attempts, alone.

        It was in time before, and nothing that it answers now would be an answer to the call.
        """
        call.num_late += kind == "timeout"
        if kind == "timeout" and call.num_late < MAX_LATE:
            logger.warning("an environment of %s is made again once more: %s", self._name, message)
            call.is_made, call.is_suspect = False, True
            self._waiting.appendleft(call)
        else:
            self._reply(call, Reply(seconds=seconds, failure=Failure("differs" if call.is_recorded else kind, message)))

    def _reply(self, environment: HeldEnvironment, reply: Reply) -> None:
        """End an environment's call. A failed one leaves no trace: the environment is then made again."""
        environment.seconds += reply.seconds
        environment.is_suspect = environment.has_ended_process = False
        environment.num_late = 0
        if reply.failure is not None:
            environment.is_made = False
        else:
            is_reset = environment.action is None
            if environment.action is not None:
                environment.history.append(environment.action)
            environment.expected.append(reply.as_message(is_reset=is_reset))
            environment.is_recorded = False
        self._replies.add(environment.row, reply)
