"""The process of an engine's program, from the side of the rollout worker that owns it."""

import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from infra.engines.program import frames
from infra.processes import lifeline
from infra.processes.isolated import dies_within, has_died, kill_group, kill_marked, variables_of_another
from infra.storage.shared_memory import SHARED_MEMORY, space
from schemas.config.rollout import EngineDtype
from schemas.errors import ConfigError, EngineLostError, WorkerLostError
from schemas.placement import Device

LOOK_SECONDS = 60.0  # for a call of a program that is started only to say what it is
LAST_LINES, MAX_LINE = 20, 1000  # of what it printed, in an error; and characters of a line
MAX_WORDS = 200  # characters of them, in an error of one line
ITEMSIZES: dict[EngineDtype, int] = {"float32": 4, "bfloat16": 2}
CHECK_SECONDS = 1.0  # between two looks at whether it lives
GRACE_SECONDS = 5.0  # to end by itself, once its connection is closed
MIB = 2**20
FULL_BYTES = 16 * MIB  # with less free, shared memory is full: a process that writes there dies of SIGBUS

logger = logging.getLogger(__name__)


class CallFailedError(Exception):
    """The program refused a call, or failed in it; it still answers.

    Attributes:
        type: The name of the exception in the program.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.type = kind


@dataclass(frozen=True)
class EngineInstallation:
    """An engine, as its program describes it."""

    engine: str  # the engine's package, or what its program calls it
    device: Device  # what it computes on
    version: str  # the engine's


class StartedEngine(BaseModel):
    """What a program answers to `start`."""

    model_config = ConfigDict(strict=True, frozen=True)

    dtype: EngineDtype  # the dtype of the weights
    itemsize: PositiveInt  # bytes of a weight
    max_model_len: PositiveInt  # the most tokens of a row
    cache_bytes: NonNegativeInt  # bytes of the KV cache, of all ranks
    processes: list[int]  # the ids of the ranks' processes
    adapted_layers: list[str] = []  # the names of the layers that have a place for adapters


class EngineProcess:
    """A program's process, and the group of its children. All end with this process, however it ends.

    What they start in other sessions is killed when it is closed or lost.

    Args:
        python: The interpreter.
        program: What it runs.
        variables: The environment variables.
        name: The engine's, for messages.
        seconds: How long a call may take, by `timeouts.engine_seconds`; None: `LOOK_SECONDS`.

    Raises:
        OSError: The interpreter can't be started.
    """

    def __init__(
        self, python: str, program: Path, variables: Mapping[str, str], name: str, seconds: float | None = None
    ) -> None:
        self.name, self._program = name, program
        self._seconds, self._key = seconds or LOOK_SECONDS, " (timeouts.engine_seconds)" if seconds else ""
        self._connection, theirs = socket.socketpair()
        self._mark = secrets.token_hex(8)
        read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [python, lifeline.__file__, str(program), str(theirs.fileno())],
                stdin=subprocess.PIPE,  # the lifeline
                stdout=write,
                stderr=write,
                pass_fds=(theirs.fileno(),),
                env={**variables, lifeline.MARK: self._mark},
            )
        except OSError:
            self._connection.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(target=self._read_lines, args=(read,), daemon=True)
        self._reader.start()
        self._lost = self._ended = self._reason = ""
        self._was_killed = False  # by a signal that is not this process's
        self._space = space(SHARED_MEMORY)  # of shared memory, before it ended

    def hello(self) -> EngineInstallation:
        """Ask the program what it is.

        Raises:
            CallFailedError: It doesn't say; see `call`.
            ConfigError: It speaks another protocol, or computes on what no run does.
            EngineLostError: It has ended, or took too long.
            KeyError: Its answer lacks a part.
        """
        said, _ = self.call("hello")
        if said.get("protocol") != frames.PROTOCOL:
            raise ConfigError(
                f"the engine of {self._program} speaks version {said.get('protocol')} of the protocol, but Sluice "
                f"{frames.PROTOCOL}: use a program of the same version"
            )
        found = EngineInstallation(str(said["engine"]), said["device"], str(said["version"]))
        if found.device not in (devices := get_args(Device)):
            raise ConfigError(
                f"the engine of {self._program} computes on {found.device!r}; expected {' or '.join(devices)}"
            )
        return found

    def start(self, arguments: Mapping[str, Any], *, eager: bool) -> StartedEngine:
        """Have the program load a model, which may take any time.

        Raises:
            CallFailedError: It can't.
            ConfigError: Its answer is none to `start`, or it loaded the model otherwise than it was asked to.
            EngineLostError: It has ended.
        """
        said, _ = self.call("start", {"engine": arguments, "eager": eager}, is_limited=False)
        try:
            started = StartedEngine.model_validate(said)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"the engine of {self._program} answers start with an unfit {key!r}: {first['msg']}"
            ) from None
        self._check_started(started, arguments)
        return started

    def _check_started(self, started: StartedEngine, arguments: Mapping[str, Any]) -> None:
        """Check that a model was loaded as it was asked for."""
        said = f"the engine of {self._program} was asked to start with"
        if started.max_model_len < (asked := arguments["max_model_len"]):
            raise ConfigError(
                f"{said} max_model_len {asked}, but has {started.max_model_len}: lower data.max_prompt_tokens, "
                "rollout.max_response_tokens or eval.max_response_tokens, or have the program take longer rows"
            )
        if started.dtype != (dtype := arguments["dtype"]):
            raise ConfigError(
                f"{said} dtype {dtype!r}, but has {started.dtype!r}: set rollout.dtype = {started.dtype!r}, or have "
                "the program take the dtype that it is given"
            )
        if started.itemsize != (itemsize := ITEMSIZES[dtype]):
            raise ConfigError(
                f"{said} dtype {dtype!r}, but answers itemsize {started.itemsize}: have the program answer "
                f"{itemsize}, the bytes of a weight"
            )

    @property
    def is_lost(self) -> bool:
        """Whether it is known to be gone."""
        return bool(self._lost)

    @property
    def pid(self) -> int:
        """The process's id, which is that of its group."""
        return self._process.pid

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] = (),
        *,
        is_limited: bool = True,
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Call the program, and return its result and the buffers with it.

        Args:
            name: The call.
            arguments: What JSON can hold.
            buffers: Objects with the buffer protocol.
            is_limited: Whether it may take no longer than the limit.

        Raises:
            CallFailedError: The program refused it, or failed in it.
            EngineLostError: The process died, took too long, or answered nonsense; it has been killed.
        """
        self.check()
        seconds = self._seconds if is_limited else None
        self._connection.settimeout(seconds)  # also between the parts of a message
        try:
            frames.send(self._connection, {"call": name, "arguments": dict(arguments or {})}, buffers)
            self._wait(seconds)
            header, found = frames.receive(self._connection)
        except TimeoutError:
            raise self.lose(f"it has not answered {name!r} within {seconds:g} s{self._key}") from None
        except (OSError, EOFError):
            raise self.lose() from None
        except frames.ProtocolError as error:
            raise self.lose(f"it answered {error}") from None
        if "error" in header:
            raise CallFailedError(str(header.get("type")), str(header["error"]))
        if not isinstance(result := header.get("result"), dict):
            raise self.lose("it answered without a result")
        return result, found

    def check(self) -> None:
        """Check that it lives.

        Raises:
            EngineLostError: It doesn't.
        """
        if not self._lost and has_died(self.pid):
            raise self.lose()
        if self._lost:
            raise EngineLostError(self._lost)

    def close(self) -> None:
        """End it."""
        self._lost = self._lost or f"{self.name}'s process was ended"
        self._kill(GRACE_SECONDS)

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """End it if the block, in which it starts, raises anything.

        Raises:
            WorkerLostError: It was killed, e.g. as memory was full. That says nothing of the program or the config, so
                it is started again as often as any worker is; of an `EngineLostError`, workers are created without end.
        """
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, EngineLostError) and self._was_killed:
                raise WorkerLostError(str(error)) from error
            raise

    @property
    def last_words(self) -> str:
        """Of a lost one, why it is lost and, if it printed any, the last characters of that, in one line."""
        printed = " ".join(" ".join(self._lines).split())[-MAX_WORDS:]
        return f"{self._reason}: {printed}" if printed else self._reason

    def memory_advice(self, reason: str) -> str:
        """Return what to add to the reason why one was lost or refused to start: about shared memory, if that is why.

        It is if the reason names its space, if it was full, or if a process wrote to a page that it has no space for.
        """
        (free, size), lacked_page = self._space, self._process.returncode == -signal.SIGBUS
        is_full = free < min(FULL_BYTES, size // 4)
        is_named = str(SHARED_MEMORY) in reason and "space" in reason.lower()
        if not (is_full or lacked_page or is_named):
            return ""
        return (
            f"; {SHARED_MEMORY} has {free // MIB} of {size // MIB} MiB free: enlarge it (for Docker: --shm-size; "
            "docs/cluster.md)"
        )

    def _wait(self, seconds: float | None) -> None:
        """Wait until it answers; a child of it may hold its connection open after its death."""
        began, poll = time.monotonic(), select.poll()
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(1000 * CHECK_SECONDS):
            if has_died(self.pid):
                raise EOFError
            if seconds is not None and time.monotonic() - began > seconds:
                raise TimeoutError

    def lose(self, reason: str = "") -> EngineLostError:
        """End it, for a reason or as it has died, and return the error that says so."""
        ended = self._kill(0.0 if reason else GRACE_SECONDS)
        self._reason = reason or ended
        said = "".join(f"\n  {line}" for line in self._lines)
        what = f", and was killed: {reason}" if reason else f": {ended}"
        what += self.memory_advice(reason)
        self._lost = f"{self.name}'s process {self.pid} is lost{what}" + (f"; its last lines:{said}" if said else "")
        return EngineLostError(self._lost)

    def _kill(self, grace_seconds: float) -> str:
        """Kill the group, and return how the process ended, now or before."""
        if self._process.returncode is None:
            self._space = space(SHARED_MEMORY)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            has_ended = dies_within(self.pid, grace_seconds)
            self._ended = kill_group(self._process)
            kill_marked(f"{lifeline.MARK}={self._mark}")
            self._was_killed = has_ended and self._process.wait() < 0
            self._reader.join(GRACE_SECONDS)
            self._connection.close()
            assert self._process.stdin is not None
            self._process.stdin.close()
        return self._ended

    def _read_lines(self, descriptor: int) -> None:
        with open(descriptor, errors="replace") as stream:
            for line in iter(partial(stream.readline, MAX_LINE), ""):
                self._lines.append(line.rstrip())
                logger.info("%s: %s", self.name, line.rstrip())


def variables_of(python: str | None) -> Mapping[str, str]:
    """Return the environment variables of an engine's interpreter; None: this process's."""
    return os.environ if python is None else variables_of_another()
