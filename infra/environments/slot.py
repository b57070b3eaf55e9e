"""One process of a pool, with its environments and their answers; if it is lost, another one takes its place."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import infra.environments.child
import infra.environments.child_calls
import infra.environments.child_threads
import infra.processes.lifeline
from infra.environments.child_calls import Mark
from infra.environments.interpreter import Interpreter
from infra.processes.isolated import IsolatedProcess
from rl_core.environments.base import Task
from schemas.config.environment import TurnLimits
from schemas.errors import EnvironmentImportError

MODULES = (
    infra.processes.lifeline,
    infra.environments.child_calls,
    infra.environments.child_threads,
    infra.environments.child,
)
# Loads the modules by their files: no package of Sluice is on the module path of its interpreter. Nor is the current
# folder, which `-P` would not add either, but only in Python 3.11 and later. They are forgotten again, as packages that
# an environment imports would lack them.
PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, json
names = json.loads(sys.argv[2])
for name, file in names:
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
for name, file in names:
    del sys.modules[name]
module.main(int(sys.argv[1]), int(sys.argv[3]))
"""
FailureKind = Literal["raised", "invalid", "timeout", "died", "differs"]
logger = logging.getLogger(__name__)
READY_SECONDS = 300.0  # for importing the environment's module
POLL_SECONDS = 1.0  # between checks that a silent process is still alive
GRACE_SECONDS = 1.0  # added to a call's limit, after which its process cancels it by itself if it can
SILENT_SECONDS = 60.0  # without a sign of life, while it is not known to run an environment's code
MAX_HUNG = 8  # threads of a process that run calls which have timed out
Loss = Literal["ended", "late", "silent"]


class EnvironmentProcess(IsolatedProcess):
    """One process that holds environments.

    Args:
        interpreter: What runs it.
        settings: Its first message; see `infra.environments.child`.
    """

    def __init__(self, interpreter: Interpreter, settings: Mapping[str, Any]) -> None:
        memory = os.memfd_create("mark")
        try:
            os.truncate(memory, Mark.SIZE)
            self.mark = Mark(memory)
            modules = json.dumps([(module.__name__, module.__file__) for module in MODULES])
            command = [interpreter.python, "-c", PROGRAM]
            super().__init__(command, [modules, str(memory)], [memory], interpreter.variables)
        finally:
            os.close(memory)
        self._unsent = b""
        self.is_ready = False
        self.started_at = time.monotonic()
        self.send(settings)

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits until the process receives earlier ones."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or as much of it as the process takes now; `flush` sends the rest."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the process takes it now."""
        with suppress(BlockingIOError):
            while self._unsent:
                try:
                    num_sent = self._connection.send(self._unsent)
                except ConnectionError:  # it has ended, which the next check detects
                    num_sent = len(self._unsent)
                self._unsent = self._unsent[num_sent:]


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


@dataclass(eq=False)
class HeldEnvironment:
    """A row's environment, from `open` to `end`.

    Attributes:
        row: The row.
        number: Differs from that of all other environments of the pool.
        task: The data row.
        seed: The seed.
        limits: The time limits of its calls.
        history: The actions that its state depends on.
        seconds: Time spent in all of its calls.
        expected: What another process's environment answered to the reset and to `history`, in JSON's types: this one
            must answer the same. None: it has, or there was no other.
        is_made: Whether its process holds it, in the state after its latest successful call.
        action: The action of its outstanding call; None: it is reset.
        limit_seconds: The time limit of its outstanding call.
        is_suspect: Whether its outstanding call may have been the cause of the loss of its process.
        has_ended_process: Whether its outstanding call was the cause of one.
    """

    row: int
    number: int
    task: Task
    seed: int
    limits: TurnLimits
    history: list[str] = field(default_factory=list)
    seconds: float = 0.0
    expected: list[dict[str, Any]] | None = None
    is_made: bool = False
    action: str | None = None
    limit_seconds: float = 0.0
    is_suspect: bool = False
    has_ended_process: bool = False


class Slot:
    """A process, or its replacement, and the environments that it holds.

    Args:
        interpreter: What runs the process.
        settings: The process's; see `infra.environments.child`.
        replies: Takes each reply.
    """

    def __init__(self, interpreter: Interpreter, settings: Mapping[str, Any], replies: Replies) -> None:
        self._interpreter, self._settings, self._replies = interpreter, settings, replies
        self.process = EnvironmentProcess(interpreter, settings)
        self._environments: dict[int, HeldEnvironment] = {}  # this and the next by number
        self._sent: dict[int, HeldEnvironment] = {}  # whose calls are sent, but not answered
        self._waiting: deque[HeldEnvironment] = deque()  # whose calls are to be sent, suspects first
        self._is_disposable, self._num_hung, self._has_warned = False, 0, False

    @property
    def num_environments(self) -> int:
        return len(self._environments)

    @property
    def is_busy(self) -> bool:
        """Whether a call has no reply yet."""
        return bool(self._sent or self._waiting)

    def add(self, environment: HeldEnvironment) -> None:
        """Take an environment, which is made when its first call begins."""
        self._environments[environment.number] = environment

    def begin(self, environment: HeldEnvironment, action: str | None, limit_seconds: float) -> None:
        """Begin a call of an environment that has none."""
        environment.action, environment.limit_seconds = action, limit_seconds
        self._waiting.append(environment)
        self.dispatch()

    def remove(self, environment: HeldEnvironment) -> None:
        """Close and forget an environment, and its call if it has one."""
        del self._environments[environment.number]
        self._sent.pop(environment.number, None)
        if environment in self._waiting:
            self._waiting.remove(environment)
        self.process.send({"number": environment.number, "close": True})

    def dispatch(self) -> None:
        """Send what the process can take now: a suspect's call on its own, others together."""
        self.process.flush()
        while self._waiting and not self._is_worn:
            environment = self._waiting[0]
            if self._sent and (environment.is_suspect or any(sent.is_suspect for sent in self._sent.values())):
                break
            self._waiting.popleft()
            self._sent[environment.number] = environment
            message: dict[str, Any] = {"number": environment.number, "seconds": environment.limit_seconds}
            if not environment.is_made:
                message["make"] = {name: getattr(environment, name) for name in ("task", "seed", "history", "expected")}
                environment.is_made = True
            self.process.send(message | {"action": environment.action})

    def seconds_to_wait(self) -> float:
        """Return after how many seconds to call `serve` if the process doesn't answer."""
        running = self.process.mark.running
        if running.number < 0:
            return POLL_SECONDS
        return min(max(0.0, running.deadline + GRACE_SECONDS - time.monotonic()), POLL_SECONDS)

    def serve(self) -> None:
        """Record answers that have arrived, and replace the process if it is lost.

        Raises:
            EnvironmentImportError: The process can't import the class, or ended while importing it.
        """
        self._record(self.process.receive())
        loss = self._loss()
        if loss is not None:
            self._replace(loss)
        elif self._is_worn and not self._sent:
            self._renew()

    @property
    def _is_worn(self) -> bool:
        """Whether to replace the process, which has too many hung threads, once its calls have ended.

        Environments that keep state, or are to be closed, are not given up for that.
        """
        return self._is_disposable and self._num_hung >= MAX_HUNG

    def _loss(self) -> Loss | None:
        """Return why the process is lost, or None.

        However late this thread itself runs, a call in time counts: only one that is still running is late.
        """
        process, now = self.process, time.monotonic()
        if process.ended or process.has_died():
            return "ended"
        if not process.is_ready:
            return "late" if now > process.started_at + READY_SECONDS else None
        running = process.mark.running
        if running.number >= 0:
            return "late" if now > running.deadline + GRACE_SECONDS else None
        return "silent" if self._sent and now > process.mark.last_beat + SILENT_SECONDS else None

    def _record(self, answers: Iterable[dict[str, Any]]) -> None:
        for answer in answers:
            if "error" in answer:
                raise EnvironmentImportError(answer["error"])
            if "warning" in answer:
                logger.warning("%s", answer["warning"])
                continue
            if "ready" in answer:
                self.process.is_ready, self._is_disposable = True, answer["is_disposable"]
                continue
            self._num_hung = answer.pop("num_hung_threads")
            if (environment := self._sent.pop(answer.pop("number"), None)) is not None:
                if "failure" in answer:
                    failure = Failure(answer["kind"], answer["failure"])
                    self._reply(environment, Reply(seconds=answer["seconds"], failure=failure))
                else:
                    self._reply(environment, Reply(**answer | {"observations": tuple(answer["observations"])}))

    def _reply(self, environment: HeldEnvironment, reply: Reply) -> None:
        """End an environment's call. A failed one leaves no trace: the environment is then made again."""
        environment.seconds += reply.seconds
        environment.is_suspect = environment.has_ended_process = False
        if reply.failure is not None:
            environment.is_made = False
        elif environment.action is not None:
            environment.history.append(environment.action)
            environment.expected = None
        self._replies.add(environment.row, reply)

    def _replace(self, loss: Loss) -> None:
        """Replace a lost process: the call that was the cause fails, all others begin anew.

        A call that ended its process fails the second time only: it may have been killed from outside. If it is not
        known whose code was the cause, each outstanding call is suspect, and begins anew on its own.
        """
        process, now = self.process, time.monotonic()
        how = process.kill()
        self._record(process.receive())  # what it sent before it was killed
        if not process.is_ready:
            what = f"ended with {how}" if loss == "ended" else f"took more than {READY_SECONDS:g} s"
            raise EnvironmentImportError(
                f"environment.path {self._settings['path']!r}: a process {what} while it imported the class"
            )
        running, outstanding = process.mark.running, list(self._sent.values())
        process.close()
        self._sent.clear()
        is_known = running.number >= 0
        if (loss == "late" and (not is_known or now < running.deadline)) or (loss == "silent" and is_known):
            causes = []  # it went on just before it was killed
        elif is_known:
            causes = [environment for environment in outstanding if environment.number == running.number]
        else:
            causes = outstanding if len(outstanding) == 1 else []
            for environment in outstanding:
                environment.is_suspect = True
        if loss == "ended":  # maybe by somebody else: its call gets another chance, on its own
            for held in (first := [held for held in causes if not held.has_ended_process]):
                held.is_suspect = held.has_ended_process = True
            causes = [held for held in causes if held not in first]
        self._waiting.extendleft(environment for environment in reversed(outstanding) if environment not in causes)
        self._start()
        message = {
            "ended": f"the environment's process ended with {how}",
            "late": f"no answer within {running.limit_seconds:g} s",
            "silent": f"the environment's process showed no sign of life for {SILENT_SECONDS:g} s",
        }[loss]
        name = self._settings["path"]
        logger.warning("environment process %d of %s is replaced: %s", process.pid, name, message)
        for environment in causes:
            seconds = min(max(0.0, now - running.deadline + running.limit_seconds), running.limit_seconds)
            again = "when it was made again: " if running.is_remade else ""
            kind: Literal["died", "timeout"] = "died" if loss == "ended" else "timeout"
            self._reply(environment, Reply(seconds=seconds, failure=Failure(kind, again + message)))

    def _renew(self) -> None:
        """Replace a process without calls, whose hung threads go on for as long as it lives."""
        process = self.process
        process.kill()
        process.close()
        logger.log(
            logging.INFO if self._has_warned else logging.WARNING,
            "environment process %d of %s is replaced: %d calls that timed out still run in threads of it; give what "
            "they wait for a time limit below environment.step_timeout_seconds",
            process.pid,
            self._settings["path"],
            self._num_hung,
        )
        self._has_warned = True
        self._start()

    def _start(self) -> None:
        """Start a process in place of another one, whose environments are made again when their next calls begin."""
        for environment in self._environments.values():
            environment.is_made = False
        self.process, self._num_hung = EnvironmentProcess(self._interpreter, self._settings), 0
