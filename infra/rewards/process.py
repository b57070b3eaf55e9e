"""A reward process, seen from its parent."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from infra.rewards.child import MESSAGE_BYTES
from rl_core.rewards import RewardItem
from schemas.config.reward import IsolatedReward

# Not multiprocessing's spawn: it would import the parent's __main__ again, which is Ray's worker, and with it Ray.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from infra.rewards.child import main; main(int(sys.argv[1]))"
)
RECEIVE_BYTES = 2**16
SEND_SECONDS = 60.0  # a process that takes nothing for so long is lost


class RewardProcess:
    """One process that loads a reward function and scores what it is sent.

    Args:
        config: The reward.
    """

    def __init__(self, config: IsolatedReward) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        path = json.dumps([folder or os.getcwd() for folder in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), path],
                stdin=subprocess.PIPE,  # the lifeline: closed by the kernel when this process ends, in whatever way
                pass_fds=(theirs.fileno(),),
                process_group=0,  # so that what it starts can be ended with it
            )
        self._received = b""
        self.ended = False
        self.concurrent: bool | None = None  # whether its items may overlap; None: it isn't ready yet
        self.outstanding: list[int] = []  # the items that it was sent and hasn't answered, in order
        self.heard_at = time.monotonic()  # when it last answered, or was sent something while it had nothing to do
        self._send(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor to wait on for answers."""
        return self._connection.fileno()

    def send(self, numbers: Sequence[int], items: Sequence[RewardItem]) -> None:
        """Have it score `items`, and answer by their `numbers`."""
        if not self.outstanding:  # else what it is at since then still counts
            self.heard_at = time.monotonic()
        self.outstanding.extend(numbers)
        self._send(list(zip(numbers, items, strict=True)))

    def receive(self) -> list[dict[str, Any]]:
        """Return the answers that are there, without waiting; sets `ended` where there will be no more."""
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
        if lines:
            self.heard_at = time.monotonic()
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if "item" in answer:
                self.outstanding.remove(answer["item"])
        return answers

    def has_died(self) -> bool:
        """Whether the process is gone, though something that it started may still hold its socket."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # where SIGCHLD is ignored, the kernel reaps it
            return True

    def kill(self) -> str:
        """End it and all that it has started; return how it had ended before, or does now."""
        with suppress(ProcessLookupError):  # not reaped yet, its group's number is still its own
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End it, and let go of its socket and its lifeline."""
        if self._process.returncode is None:
            self.kill()
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _send(self, message: object) -> None:
        data = pickle.dumps(message)
        self._connection.settimeout(SEND_SECONDS)
        try:
            self._connection.sendall(MESSAGE_BYTES.pack(len(data)) + data)
        except ConnectionError:
            pass  # it has ended, and will be found to have
        except TimeoutError:  # with half a message it is of no further use
            os.killpg(self.pid, signal.SIGKILL)
        self._connection.setblocking(False)
