"""A process that can be killed with its children, shows what it runs, and answers in lines of JSON."""

import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.processes.calls import MESSAGE_BYTES, SharedCallState

RECEIVE_BYTES = 2**16
GRACE_POLL_SECONDS = 0.01
KILL_SECONDS = 30.0  # within which a killed process is gone, unless it is stuck in the kernel

logger = logging.getLogger(__name__)


def variables_of_another() -> dict[str, str]:
    """Return the environment variables of another interpreter's process: it doesn't find this one's modules."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}


def has_died(pid: int) -> bool:
    """Return whether a child of this process has died; it stays unreaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # if SIGCHLD is ignored, the kernel reaps it
        return True


def dies_within(pid: int, seconds: float) -> bool:
    """Wait at most so long for the death of a child of this process, and return whether it has died."""
    deadline = time.monotonic() + seconds
    while not (died := has_died(pid)) and time.monotonic() < deadline:
        time.sleep(GRACE_POLL_SECONDS)
    return died


def kill_group(process: "subprocess.Popen[bytes]", grace_seconds: float = 0.0) -> str:
    """Kill a process that leads a group, and its children; return how it ended, now or before.

    Args:
        process: It is not reaped yet.
        grace_seconds: How long it may take to end by itself.
    """
    dies_within(process.pid, grace_seconds)
    with suppress(ProcessLookupError):  # it is not reaped yet, so its group id can't have been reused
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it doesn't lead its group yet
    try:
        code = process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:  # it is in the kernel, such as in a driver's or a lost file system's call
        logger.warning("process %d is still there %g s after SIGKILL, and is left", process.pid, KILL_SECONDS)
        return f"no end within {KILL_SECONDS:g} s of SIGKILL"
    return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that leads a group, if it is not reaped yet, and what it has started in others."""
    if process.returncode is None:
        _kill_descendants(process.pid)
        kill_group(process)


def _kill_descendants(pid: int) -> None:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                _kill_descendants(child)
                os.kill(child, signal.SIGKILL)


def count_sleeps(pid: int) -> dict[str, str] | None:
    """Return how often each thread of a process and of its descendants has stopped; None if one runs, or may run.

    Two equal results: none of them has run in between.
    """
    counts: dict[str, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # it has ended
            status = (task / "status").read_text()
            if status.partition("State:\t")[2][:1] in "RD":  # or the kernel doesn't say
                return None
            counts[task.name] = status.partition("voluntary_ctxt_switches:")[2]
            if not (task / "children").exists() and (task / "status").exists():
                return None  # nor does it list children
            for child in map(int, (task / "children").read_text().split()):
                if (others := count_sleeps(child)) is None:
                    return None
                counts |= others
    return counts


def kill_marked(beginning: str) -> None:
    """Kill the processes, in any session, of which a variable of the environment, as NAME=VALUE, begins so."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (process / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(beginning.encode()) for variable in variables):
                os.kill(int(process.name), signal.SIGKILL)


class IsolatedProcess:
    """A process group whose program begins with `infra.processes.calls.Parent`.

    Args:
        command: The program.
        arguments: Its arguments after the first two, which are the descriptors for `Parent`.
        settings: The first message that it gets.
        variables: Its environment variables; None: this process's.

    Attributes:
        state: What it is doing.
        ready: Its first answer, once it can take calls.
        ended: Whether no more answers will follow.
        started_at: When it was started, by `time.monotonic`.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        settings: bytes,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        memory = os.memfd_create("calls")
        try:
            os.truncate(memory, SharedCallState.SIZE)
            self.state = SharedCallState(memory)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(memory), *arguments],
                stdin=subprocess.PIPE,  # the lifeline: the kernel closes it when this process ends, however it ends
                pass_fds=(theirs.fileno(), memory),
                env=variables,
                process_group=0,  # so that its children can be killed with it
            )
        finally:
            theirs.close()
            os.close(memory)
        self._received, self._unsent = b"", bytearray()
        self.ready: dict[str, Any] | None = None
        self.ended, self.started_at = False, time.monotonic()
        self.send(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when answers arrive."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits until the process receives earlier ones."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or as much of it as the process takes now; `flush` sends the rest."""
        self._unsent += MESSAGE_BYTES.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the process takes it now."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # it has ended, which the next check detects
            self._unsent.clear()

    def receive(self) -> list[dict[str, Any]]:
        """Return the answers received so far, without waiting; sets `ended` if no more will follow."""
        while not self.ended:
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.ended = not data
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def has_died(self) -> bool:
        """Return whether the process has died; a child of it may still hold its socket open."""
        return has_died(self.pid)

    def kill(self, grace_seconds: float = 0.0) -> str:
        """Kill the process and its children; return how it ended, now or before.

        Args:
            grace_seconds: How long it may take to end by itself.
        """
        return kill_group(self._process, grace_seconds)

    def close(self) -> None:
        """Kill the process, and close its socket and its lifeline."""
        if self._process.returncode is None:
            self.kill()
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
