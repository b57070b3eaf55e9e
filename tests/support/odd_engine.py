"""A program that speaks the engines' protocol, and misbehaves as it is told; it generates nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

ODD = Path(__file__)
BEHAVIOUR = "ODD_ENGINE"  # the variable with the behaviour by call, in JSON


def open_odd_engine(seconds: float = 600, **behaviour: str) -> Any:
    """Start it.

    Args:
        seconds: How long a call may take.
        behaviour: By call: "raise TEXT", "die TEXT", "killed TEXT", "hang", "half" of an answer, "garbage",
            "print TEXT", "leave" a process in another session, "share" memory, "overfill" it, or
            what it answers, in JSON.
    """
    from infra.engines.program.process import EngineProcess

    return EngineProcess(sys.executable, ODD, os.environ | {BEHAVIOUR: json.dumps(behaviour)}, "odd", seconds)


def shared_by(*pids: int) -> list[str]:
    """Return the files in `/dev/shm`, not those in folders there, that processes map."""
    lines = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids).splitlines()
    mapped = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}  # a semaphore's has another name there
    with os.scandir("/dev/shm") as entries:
        return sorted(entry.path for entry in entries if entry.inode() in mapped)


def calls_of(process: Any) -> list[Any]:
    """Return the names and arguments of the calls that it has had."""
    found: list[Any] = process.call("calls")[0]["calls"]
    return found


class OddEngine:
    """Answers any call."""

    def __init__(self) -> None:
        self._behaviour, self._calls = json.loads(os.environ[BEHAVIOUR]), list[Any]()

    def __getattr__(self, name: str) -> Any:
        def call(arguments: dict[str, Any], buffers: list[bytearray]) -> tuple[dict[str, Any], list[Any]]:
            if name == "calls":
                return {"calls": self._calls}, []
            self._calls.append([name, arguments])
            what, _, text = self._behaviour.get(name, "{}").partition(" ")
            if what == "raise":
                raise RuntimeError(text)
            if what == "die":
                print(text, file=sys.stderr, flush=True)
                os._exit(3)
            if what == "killed":
                print(text, file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "half":
                os.write(int(sys.argv[1]), b"\0\0\0\4")
            if what in ("half", "hang"):
                signal.pause()
            if what == "leave":
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                return {"child": child.pid}, []
            if what == "share":
                self._segment, self._lock = SharedMemory(create=True, size=2**20), get_context("spawn").Lock()
                return {"shared": shared_by(os.getpid())}, []
            if what == "overfill":
                self._segment = SharedMemory(create=True, size=2**23)
                self._segment.buf[:] = bytes(2**23)
            if what == "garbage":
                os.write(int(sys.argv[1]), b"\0\0\0\4oops")
            if what == "print":
                os.write(1, text.encode() * 1000 + b"\n")
                return {}, buffers
            return json.loads(self._behaviour.get(name, "{}")), buffers

        return call


if __name__ == "__main__":
    program = Path(__file__).parents[2] / "infra" / "engines" / "program"
    sys.path.append(str(program))
    import frames

    frames.serve(socket.socket(fileno=int(sys.argv[1])), OddEngine())
