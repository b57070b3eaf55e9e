"""A reward process, from its parent's side."""

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
from schemas.config.reward_base import IsolatedReward

# Not multiprocessing's spawn: it would import the parent's __main__, which is Ray's worker, and with it Ray.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from infra.rewards.child import main; main(int(sys.argv[1]))"
)
RECEIVE_BYTES = 2**16
SEND_SECONDS = 60.0  # a process that receives nothing for this long is killed


class RewardProcess:
    """One process that loads a reward function and scores the items that it is sent.

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
                stdin=subprocess.PIPE,  # the lifeline: the kernel closes it when this process ends, however it ends
                pass_fds=(theirs.fileno(),),
                process_group=0,  # so that its children can be killed with it
            )
        self._received = b""
        self.ended = False
        self.concurrent: bool | None = None  # whether calls may overlap; None: not ready yet
        self.outstanding: list[int] = []  # items sent but not answered, in order
        self.last_active = time.monotonic()  # when it last answered, or was sent something while idle
        self._send(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when answers arrive."""
        return self._connection.fileno()

    def send(self, numbers: Sequence[int], items: Sequence[RewardItem]) -> None:
        """Send `items` to be scored and answered under their `numbers`."""
        if not self.outstanding:  # else the time already spent on the current item counts
            self.last_active = time.monotonic()
        self.outstanding.extend(numbers)
        self._send(list(zip(numbers, items, strict=True)))

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
        if lines:
            self.last_active = time.monotonic()
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if "item" in answer:
                self.outstanding.remove(answer["item"])
        return answers

    def has_died(self) -> bool:
        """Return whether the process has died; a child of it may still hold its socket open."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # if SIGCHLD is ignored, the kernel reaps it
            return True

    def kill(self) -> str:
        """Kill the process and its children; return how it ended, now or before."""
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

    def _send(self, message: object) -> None:
        data = pickle.dumps(message)
        self._connection.settimeout(SEND_SECONDS)
        try:
            self._connection.sendall(MESSAGE_BYTES.pack(len(data)) + data)
        except ConnectionError:
            pass  # it has ended, which the next check detects
        except TimeoutError:  # after half a message it is unusable
            os.killpg(self.pid, signal.SIGKILL)
        self._connection.setblocking(False)
