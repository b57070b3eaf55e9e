"""A reward process, from its parent's side."""

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from infra.processes.isolated import IsolatedProcess
from infra.rewards.child import MESSAGE_BYTES
from rl_core.rewards import RewardItem
from schemas.config.reward_base import IsolatedReward

# Not multiprocessing's spawn: it would import the parent's __main__, which is Ray's worker, and with it Ray.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from infra.rewards.child import main; main(int(sys.argv[1]))"
)
SEND_SECONDS = 60.0  # a process that receives nothing for this long is killed


class RewardProcess(IsolatedProcess):
    """One process that loads a reward function and scores the items that it is sent.

    Args:
        config: The reward.
    """

    def __init__(self, config: IsolatedReward) -> None:
        path = json.dumps([folder or os.getcwd() for folder in sys.path])
        super().__init__([sys.executable, "-P", "-c", PROGRAM], [path])
        self.concurrent: bool | None = None  # whether calls may overlap; None: not ready yet
        self.outstanding: list[int] = []  # items sent but not answered, in order
        self.last_active = time.monotonic()  # when it last answered, or was sent something while idle
        self._send(config)

    def send(self, numbers: Sequence[int], items: Sequence[RewardItem]) -> None:
        """Send `items` to be scored and answered under their `numbers`."""
        if not self.outstanding:  # else the time already spent on the current item counts
            self.last_active = time.monotonic()
        self.outstanding.extend(numbers)
        self._send(list(zip(numbers, items, strict=True)))

    def receive(self) -> list[dict[str, Any]]:
        """Return the answers received so far, without waiting; sets `ended` if no more will follow."""
        answers = super().receive()
        if answers:
            self.last_active = time.monotonic()
        for answer in answers:
            if "item" in answer:
                self.outstanding.remove(answer["item"])
        return answers

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
