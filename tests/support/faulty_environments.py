"""Environments that misbehave when an action says so, run in real environment processes. It imports little."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

BIG_CHARACTERS = 10**6
BAD_RESULTS = {
    "none": None,
    "text": "4",
    "pair": ("4", 1.0),
    "number": (4, 1.0, False),
    "bytes": (b"4", 1.0, False),
    "numbers": (["4", 4], 1.0, False),
    "messages": (["4"] * 65, 1.0, False),
    "surrogate": ("4\udc80", 1.0, False),
    "word": ("4", "1.0", False),
    "nan": ("4", float("nan"), False),
    "huge": ("4", 10**400, False),
    "whether": ("4", 1.0, 1),
    "metric": ("4", 1.0, False, {"depth": float("inf")}),
    "list": ("4", 1.0, False, [("depth", 1.0)]),
}


def misbehave(word: str) -> None:
    """Do what the action says, unless it is harmless."""
    if word == "hang":
        time.sleep(600)
    if word == "spin":
        re.match(r"(a+)+$", "a" * 60 + "b")  # never releases the interpreter
    if word == "crash":
        ctypes.string_at(0)
    if word == "leave":
        os._exit(3)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "raise":
        raise RuntimeError("no such luck")
    if word == "exit":
        sys.exit("enough")
    if word == "print":
        print('{"number": 1}')
        os.write(1, b'{"ready": false}\n')


class Counting:
    """Counts its actions, and says all of them: a reply shows its whole history.

    A fault can also be the task's answer; then making or resetting has it.
    """

    def __init__(self, task, seed, limit=100, log=None):
        self.task, self.count, self.limit, self.log, self.said = task, seed, limit, log, []

    def reset(self):
        misbehave(self.task["answer"])
        return f"{self.task['answer']} from {self.count}"

    def step(self, action):
        self.said.append(action)
        self.count += 1
        misbehave(action)
        if action == "big":
            return "x" * BIG_CHARACTERS, 1.0, False
        if action == "child":
            child = subprocess.Popen(["sleep", "600"])
            Path(self.log).write_text(str(child.pid))
            time.sleep(600)
        if action in BAD_RESULTS:
            return BAD_RESULTS[action]
        if action.startswith("say "):
            return action[4:], 0.0, False
        if action.startswith("list "):
            return action[5:].split(), 0.0, False
        text = ",".join(word[:10] for word in self.said)
        return f"{self.count}: {text}", self.count / 2, self.count >= self.limit, {"said": len(self.said)}

    def close(self):
        if self.log is not None:
            with open(self.log, "a") as log:
                log.write(f"{self.task['answer']}\n")
        misbehave(self.said[-1].removeprefix("close ") if self.said else "")


class Stateless(Counting):
    """Says that it counts nothing."""

    keeps_state = False


class AsyncCounting(Counting):
    """Its calls overlap."""

    role = "tool"

    async def reset(self):
        await asyncio.sleep(0.001)
        return super().reset()

    async def step(self, action):
        await asyncio.sleep(0.001)
        if action == "wait":
            self.said.append(action)
            await asyncio.sleep(600)
        if action == "stubborn":
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(600)
        if action == "nap":
            await asyncio.sleep(0.1)
        if action == "block":
            time.sleep(1.5)
        if action == "callback":
            asyncio.get_running_loop().call_soon(time.sleep, 600)
            await asyncio.sleep(600)
        if action == "foreign":
            await asyncio.new_event_loop().create_future()
        if action == "task":  # of its own
            await asyncio.gather(asyncio.sleep(0.001), self._hang())
        if action == "thread":
            await asyncio.to_thread(os._exit, 3)
        if action == "later":
            self.later = asyncio.create_task(self._hang())
            action = "1"
        return super().step(action)

    async def _hang(self):
        await asyncio.sleep(0.001)
        time.sleep(600)


class HangingThread:
    """Its reset hangs in a thread if the task says so."""

    keeps_state = False

    def __init__(self, task, seed):
        self.hangs = task["answer"] == "hang"

    async def reset(self):
        if self.hangs:
            await asyncio.to_thread(threading.Event().wait)

    def step(self, action):
        return action, 0.0, True


class HangingGame(HangingThread):
    """Keeps state."""

    keeps_state = True


class HangingSession(HangingThread):
    """Is to be closed."""

    def close(self):
        pass


class Meeting:
    """Each step waits until all environments of the process are in it."""

    arrived, everyone = 0, asyncio.Event()

    def __init__(self, task, seed):
        self.expected = seed

    async def reset(self):
        pass

    async def step(self, action):
        Meeting.arrived += 1
        if Meeting.arrived == self.expected:
            self.everyone.set()
        await self.everyone.wait()
        return action, 1.0, True


class Nested:
    """Plain, but runs an event loop of its own."""

    def __init__(self, task, seed):
        pass

    def reset(self):
        return None

    def step(self, action):
        return asyncio.run(self._answer(action)), 1.0, True

    async def _answer(self, action):
        await asyncio.sleep(0.001)
        return f"{action} {threading.current_thread() is threading.main_thread()}"


class MadeOnce:
    """Can be made only once for each task: then it does what the action `later FAULT` said, `once` or every time."""

    def __init__(self, task, seed, folder):
        self.file = Path(folder) / task["answer"]

    def reset(self):
        if self.file.exists():
            fault = self.file.read_text()
            if fault.startswith("once "):
                self.file.unlink()
            misbehave(fault.removeprefix("once "))
        return "made"

    def step(self, action):
        if action.startswith("later "):
            self.file.write_text(action.removeprefix("later "))
        misbehave(action)
        return action, 0.0, False


class SlowlyMadeAgain(MadeOnce):
    """The same, but waits instead of blocking."""

    async def reset(self):
        if self.file.exists():
            self.file.unlink()
            await asyncio.sleep(600)
        return "made"


class Modules:
    """Says which of some modules its process has imported."""

    def __init__(self, task, seed):
        pass

    def reset(self):
        return [name for name in ("infra", "rl_core", "schemas", "pydantic", "numpy", "torch") if name in sys.modules]

    def step(self, action):
        return action, 0.0, True


class Resetting:
    """Can't be stepped."""

    def __init__(self, task, seed):
        pass

    def reset(self):
        return None


NO_CLASS = 3
