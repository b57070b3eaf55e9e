"""Supervision of processes that run users' code: one that hangs or crashes costs the call that did it, no other.

Which call's code a process runs is marked in memory that its parent reads, also after its end
(`infra.processes.calls.SharedCallState`). So a loss has one known cause, even if hundreds of async calls overlap.
"""

import logging
import math
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from infra.processes.calls import Running
from infra.processes.isolated import IsolatedProcess
from schemas import errors
from schemas.errors import UserError

READY_SECONDS = 300.0  # for importing the user's module
POLL_SECONDS = 1.0  # between checks that a silent process is still alive
GRACE_SECONDS = 1.0  # added to a call's limit, at which its process cancels it if it can; and for a process to end
SILENT_SECONDS = 60.0  # without a sign of life, while it is not known to run a user's code
MAX_HUNG = 8  # threads of a process that run calls which have timed out
Loss = Literal["ended", "late", "silent"]
LossKind = Literal["died", "timeout"]
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ProcessCall:
    """What a process runs at a time, from when it waits to be sent until it is answered."""

    number: int  # differs from that of all others that its process may have
    is_suspect: bool = False  # whether it may have been the cause of the loss of its process: then it is run on its own
    has_ended_process: bool = False  # whether it was the cause of one that ended


AnyCall = TypeVar("AnyCall", bound=ProcessCall)


class Slot(ABC, Generic[AnyCall]):
    """A process, or its replacement, and its calls.

    Args:
        name: What it runs, for messages.
        start: Starts a process.
        waiting: The calls to be sent, suspects first; slots that share it take them in turns.

    Attributes:
        sent: Those that are sent, but not answered, by number.
        process: The process.
        num_hung: Threads of the process in which calls that timed out still run.
    """

    kind: str  # of the users' code
    loading: str  # what a process does before it is ready
    load_error: type[UserError]

    def __init__(self, name: str, start: Callable[[], IsolatedProcess], waiting: deque[AnyCall]) -> None:
        self._name, self._start, self._waiting = name, start, waiting
        self.sent: dict[int, AnyCall] = {}
        self.process = start()
        self.num_hung = 0
        self._has_ended_while_loading = False

    def take(self) -> bool:
        """Send the next waiting call if the process can take it now, a suspect on its own; return whether it could."""
        if not self._waiting or not self._has_room():
            return False
        if self.sent and (self._waiting[0].is_suspect or any(call.is_suspect for call in self.sent.values())):
            return False
        call = self._waiting.popleft()
        self.sent[call.number] = call
        self.process.send(self._message(call))
        return True

    def seconds_to_wait(self) -> float:
        """Return after how many seconds to call `serve` if the process doesn't answer."""
        running = self.process.state.running
        if running.number < 0:
            return POLL_SECONDS
        return min(max(0.0, running.deadline + GRACE_SECONDS - time.monotonic()), POLL_SECONDS)

    def serve(self) -> None:
        """Record answers that have arrived, and replace the process if it is lost.

        Raises:
            UserError: The process can't load the user's code, or ended while loading it.
        """
        self.process.flush()
        self._record(self.process.receive())
        if (loss := self._loss()) is not None:
            self._replace(loss)

    def restart(self) -> None:
        """Kill the process, drop the calls that it has, and start another one."""
        self.process.close()
        self.sent.clear()
        self.process = self._start()
        self.num_hung = 0

    @abstractmethod
    def _has_room(self) -> bool:
        """Return whether the process takes another call."""

    @abstractmethod
    def _message(self, call: AnyCall) -> bytes:
        """Return what has the process begin a call."""

    @abstractmethod
    def _answer(self, call: AnyCall | None, answer: dict[str, Any]) -> None:
        """Record the answer to a call; None: nobody waits for it any more."""

    @abstractmethod
    def _fail(self, call: AnyCall, kind: LossKind, message: str, running: Running, now: float) -> None:
        """Record that a call has cost its process, which ran this code at this time."""

    def _record(self, answers: Iterable[dict[str, Any]]) -> None:
        for answer in answers:
            if "error" in answer:
                raise getattr(errors, answer["type"])(answer["error"])
            if "warning" in answer:
                logger.warning("%s", answer["warning"])
            elif "ready" in answer:
                self.process.ready, self._has_ended_while_loading = answer, False
            else:
                self.num_hung = answer.pop("num_hung_threads")
                self._answer(self.sent.pop(answer.pop("number"), None), answer)

    def _loss(self) -> Loss | None:
        """Return why the process is lost, or None.

        However late this thread itself runs, a call in time counts: only one that is still running is late.
        """
        process, now = self.process, time.monotonic()
        if process.ended or process.has_died():
            return "ended"
        if process.ready is None:
            return "late" if now > process.started_at + READY_SECONDS else None
        running = process.state.running
        if running.number >= 0:
            return "late" if now > running.deadline + GRACE_SECONDS else None
        return "silent" if self.sent and now > process.state.last_beat + SILENT_SECONDS else None

    def _replace(self, loss: Loss) -> None:
        """Replace a lost process: the call that was the cause fails, all others wait again, before those that wait."""
        process, now = self.process, time.monotonic()
        how = process.kill(GRACE_SECONDS if loss == "ended" else 0.0)  # its socket closes a little before its end
        self._record(process.receive())  # what it sent before it was killed
        running, outstanding = process.state.running, list(self.sent.values())
        causes = self._causes(loss, running, now) if process.ready else self._causes_while_loading(loss, how)
        self._waiting.extendleft(call for call in reversed(outstanding) if call not in causes)
        self.restart()
        message = {
            "ended": f"the {self.kind}'s process ended with {how}",
            "late": f"no answer within {running.limit_seconds:g} s",
            "silent": f"the {self.kind}'s process showed no sign of life for {SILENT_SECONDS:g} s",
        }[loss]
        logger.warning("%s process %d of %s is replaced: %s", self.kind, process.pid, self._name, message)
        for call in causes:
            self._fail(call, "died" if loss == "ended" else "timeout", message, running, now)

    def _causes_while_loading(self, loss: Loss, how: str) -> Sequence[AnyCall]:
        """Return no call: none caused the loss of a process that wasn't ready; raise if the user's code did."""
        if loss == "ended" and not self._has_ended_while_loading:
            self._has_ended_while_loading = True
            return []
        what = f"ended with {how}" if loss == "ended" else f"took more than {READY_SECONDS:g} s"
        advice = "; what its module does when it is imported ends it" if loss == "ended" else ""
        raise self.load_error(f"{self.kind} {self._name!r}: a process {what} while it {self.loading}{advice}")

    def _causes(self, loss: Loss, running: Running, now: float) -> Sequence[AnyCall]:
        """Return the call that was the cause of a loss, if there is one, and mark suspects.

        A call that ended its process is the cause the second time only: it may have been killed from outside. If it is
        not known whose code was the cause, each outstanding call is suspect.
        """
        is_known, causes = running.number >= 0, list(self.sent.values())
        if (loss == "late" and (not is_known or now < running.deadline)) or (loss == "silent" and is_known):
            return []  # it went on just before it was killed
        if is_known:
            causes = [call for call in causes if call.number == running.number]
        elif len(causes) > 1:
            for call in causes:
                call.is_suspect = True
            return []
        if loss == "ended" and causes and not causes[0].has_ended_process:
            causes[0].is_suspect = causes[0].has_ended_process = True
            return []
        return causes


def serve(slots: Sequence[Slot[Any]], limit_seconds: float = math.inf, wake: int | None = None) -> None:
    """Send waiting calls, the least busy process first; then serve the slots after an answer or an expired limit.

    Args:
        slots: At least one.
        limit_seconds: How long to wait at most.
        wake: A descriptor that ends the wait when it becomes readable.

    Raises:
        UserError: See `Slot.serve`.
    """
    while any(slot.take() for slot in sorted(slots, key=lambda slot: len(slot.sent))):
        pass
    poll = select.poll()
    for slot in slots:
        poll.register(slot.process, select.POLLIN | (select.POLLOUT if slot.process.has_unsent else 0))
    if wake is not None:
        poll.register(wake, select.POLLIN)
    poll.poll(1000 * min(limit_seconds, *(slot.seconds_to_wait() for slot in slots)))
    for slot in slots:
        slot.serve()


def wait_until_ready(slots: Sequence[Slot[Any]]) -> None:
    """Wait until the processes of all slots have loaded the user's code.

    Raises:
        UserError: See `Slot.serve`.
    """
    while any(slot.process.ready is None for slot in slots):
        serve(slots)


def close_all(slots: list[Any]) -> None:
    """Kill the processes of slots, and forget them."""
    for slot in slots:
        slot.process.close()
    slots.clear()
