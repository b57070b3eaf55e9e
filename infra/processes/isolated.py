"""A process that can be killed with its children, and answers in lines of JSON."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

RECEIVE_BYTES = 2**16
GRACE_POLL_SECONDS = 0.01


class IsolatedProcess:
    """A process group that serves a socket, and calls `infra.processes.lifeline.end_with_parent` when it starts.

    Args:
        command: The program.
        arguments: Its arguments after the first one, which is the descriptor of its socket.
        descriptors: Further descriptors that it inherits.
        variables: Its environment variables; None: this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                stdin=subprocess.PIPE,  # the lifeline: the kernel closes it when this process ends, however it ends
                pass_fds=(theirs.fileno(), *descriptors),
                env=variables,
                process_group=0,  # so that its children can be killed with it
            )
        self._received = b""
        self.ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when answers arrive."""
        return self._connection.fileno()

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
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # if SIGCHLD is ignored, the kernel reaps it
            return True

    def kill(self, grace_seconds: float = 0.0) -> str:
        """Kill the process and its children; return how it ended, now or before.

        Args:
            grace_seconds: How long it may take to end by itself.
        """
        deadline = time.monotonic() + grace_seconds
        while not self.has_died() and time.monotonic() < deadline:
            time.sleep(GRACE_POLL_SECONDS)
        with suppress(ProcessLookupError):  # it is not reaped yet, so its group id can't have been reused
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Kill the process, and close its socket and its lifeline."""
        if self._process.returncode is None:
            self.kill()
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
