"""Calls of users' code, in its process: requests and answers, time limits, and whose code is running.

It and what it imports need the standard library only, like `infra.environments.child`.
"""

import asyncio
import inspect
import json
import mmap
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from traceback import extract_tb
from types import TracebackType
from typing import Any, NamedTuple

from infra.processes.lifeline import end_with_parent
from rl_core.user_code import outside_of_loop

BEAT_SECONDS = 1.0  # between two signs of life
MESSAGE_BYTES = struct.Struct("!Q")  # the length of the message that follows
MAX_FAILURE_CHARACTERS = 1000  # of a failure's message, which is logged
MIN_WAIT_SECONDS = 0.01  # between two looks at a clock that may stand still


class CallError(Exception):
    """A call failed; `kind` is that of `infra.environments.pool.Failure`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Running(NamedTuple):
    """Whose code a process is running right now."""

    number: int = -1  # of the call, or of its environment; -1: none
    deadline: float = 0.0  # of `time.monotonic`, which is the same clock in all processes
    limit_seconds: float = 0.0
    is_remade: bool = False  # whether it is being made again


class SharedCallState:
    """What a process is doing, in memory that its parent can read whatever the process does, and after its end.

    Args:
        descriptor: A file in memory of `SIZE` bytes; this doesn't close it.
    """

    SIZE = 40

    def __init__(self, descriptor: int) -> None:
        self._map(mmap.mmap(descriptor, self.SIZE))
        self.running = Running()

    def detach(self) -> None:
        """Show no parent any more what this process does."""
        self._map(bytearray(self.SIZE))

    @property
    def running(self) -> Running:
        return Running(self._ints[1], self._floats[2], self._floats[3], bool(self._ints[4]))

    @running.setter
    def running(self, value: Running) -> None:
        if value.number >= 0:  # and before the number is: who reads both meanwhile takes none for late
            self._floats[2], self._floats[3], self._ints[4] = value[1:]
        self._ints[1] = value.number

    @property
    def last_beat(self) -> float:
        """When the process last showed a sign of life; 0.0: not yet."""
        return self._floats[0]

    def beat(self) -> None:
        self._floats[0] = time.monotonic()

    def _map(self, memory: mmap.mmap | bytearray) -> None:
        # Views write each number at once; `struct.pack_into` clears its bytes first, and a reader would see that.
        self._floats, self._ints = memoryview(memory).cast("d"), memoryview(memory).cast("q")


class Parent:
    """The parent of this process: sends messages, and takes lines of JSON. This process ends with it.

    Messages are preceded by their length (`MESSAGE_BYTES`). A fork of this process neither reads nor answers.

    Attributes:
        state: Shows the parent what this process does.
    """

    def __init__(self, descriptor: int, memory: int) -> None:
        end_with_parent()
        self._descriptor, self.state = descriptor, SharedCallState(memory)
        os.set_inheritable(descriptor, False)
        os.close(memory)
        os.register_at_fork(after_in_child=self._detach)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages until the socket closes, and show signs of life meanwhile."""
        reader, self._writer = await asyncio.open_connection(sock=socket.socket(fileno=self._descriptor))
        beats = asyncio.create_task(self._beat())
        asyncio.get_running_loop().set_task_factory(create_task)
        with suppress(asyncio.IncompleteReadError):
            while True:
                (num_bytes,) = MESSAGE_BYTES.unpack(await reader.readexactly(MESSAGE_BYTES.size))
                yield await reader.readexactly(num_bytes)
        beats.cancel()

    def answer(self, **values: Any) -> None:
        """Send a line of JSON."""
        self.state.beat()
        self._writer.write(json.dumps(values).encode() + b"\n")

    async def refuse(self, kind: str, message: str) -> None:
        """Send the class of an error, one of `schemas.errors`, and its message, before this process ends."""
        self.answer(error=message, type=kind)
        await self._writer.drain()

    async def _beat(self) -> None:
        while True:
            self.state.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _detach(self) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, self._descriptor, inheritable=False)
        os.close(nothing)
        self.state.detach()


class Call:
    """A limit on the time of a call's code.

    The clock stands still while code of other calls runs, and while all that it does is to wait for a thread.
    """

    current: ContextVar["Call"] = ContextVar("current")
    all_busy_seconds = 0.0  # for which code of any call has been running

    def __init__(self, state: SharedCallState, number: int, limit_seconds: float, *, is_remade: bool = False) -> None:
        self._state, self._number, self._limit_seconds, self._is_remade = state, number, limit_seconds, is_remade
        self._began, self._busy_before, self._busy_seconds = time.monotonic(), Call.all_busy_seconds, 0.0
        self._is_over = False  # then what still runs in the background gets the limit again
        self._num_waiting, self._num_running = 0, 0  # threads
        self._stalled_at: float | None = None  # by the clock, if it stands still
        self._stalled_seconds = 0.0

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._is_over = True
        if isinstance(error, CallError) and self._is_remade:
            raise CallError(error.kind, f"when it was made again: {error}") from error

    @property
    def seconds(self) -> float:
        """The seconds spent so far."""
        now = self._seconds_without_others() if self._stalled_at is None else self._stalled_at
        return now - self._stalled_seconds

    @property
    def seconds_left(self) -> float:
        """The seconds that its limit leaves, by the same clock; below 0 if it is over."""
        return self._limit_seconds - self.seconds

    def count_threads(self, *, waiting: int = 0, running: int = 0) -> None:
        """Note by how many more, or fewer, threads it waits until they begin, and by how many it runs."""
        now = self._seconds_without_others()
        self._num_waiting += waiting
        self._num_running += running
        is_stalled = self._num_waiting > 0 and self._num_running == 0
        if is_stalled and self._stalled_at is None:
            self._stalled_at = now
        elif not is_stalled and self._stalled_at is not None:
            self._stalled_seconds += now - self._stalled_at
            self._stalled_at = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a user's function returns, awaited if it is async.

        Raises:
            CallError: The function raised, or awaited for too long. One that blocks for too long ends with the process.
        """
        try:
            with self.marked(), outside_of_loop():
                result = function(*arguments)
        except CallError:
            raise
        except BaseException as raised:  # a user's code may raise anything
            raise CallError("raised", describe(raised)) from raised
        return await self.finish(result) if inspect.isawaitable(result) else result

    async def finish(self, result: Awaitable[Any]) -> Any:
        """Return what a user's async function returns.

        Raises:
            CallError: It raised, or awaited for too long; then it is cancelled, and not waited for.
        """
        Call.current.set(self)
        task = asyncio.create_task(_await(result))
        try:
            while not task.done() and (left := self.seconds_left) > 0:
                await asyncio.wait([task], timeout=max(left, MIN_WAIT_SECONDS))
            if not task.done():
                raise CallError("timeout", f"no answer within {self._limit_seconds:g} s")
        finally:
            self._is_over = not task.done()
            task.cancel()
        if task.cancelled():
            raise CallError("raised", "CancelledError: the call was cancelled")
        if (error := task.exception()) is not None:
            raise error if isinstance(error, CallError) else CallError("raised", describe(error)) from error
        return task.result()

    def _seconds_without_others(self) -> float:
        others = Call.all_busy_seconds - self._busy_before - self._busy_seconds
        return time.monotonic() - self._began - others

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Show, in the shared state, that what runs in this context is the call's code."""
        before, began = self._state.running, time.monotonic()
        left = self._limit_seconds - (0.0 if self._is_over else self.seconds)
        self._state.running = Running(self._number, began + left, self._limit_seconds, self._is_remade)
        try:
            yield
        finally:
            busy_seconds = time.monotonic() - began
            self._busy_seconds += busy_seconds
            Call.all_busy_seconds += busy_seconds
            self._state.beat()
            self._state.running = before


class MarkedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine of a call, which is shown whenever it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], call: Call) -> None:
        self._coroutine, self._call = coroutine, call

    def send(self, value: Any) -> Any:
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:  # such as `cr_frame`, by which others know its state
        return getattr(self._coroutine, name)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with self._call.marked():
                return function(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop
            raise CallError("raised", describe(error)) from error


async def _await(result: Awaitable[Any]) -> Any:
    return await result


def create_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    """Create a task, as the factory of a loop's tasks; one of a call's, or of its tasks', is shown."""
    call = Call.current.get(None)
    return asyncio.Task(coroutine if call is None else MarkedCoroutine(coroutine, call), loop=loop, **options)


def describe(error: BaseException) -> str:
    """Return an error's type, message and place as one line without lone surrogates."""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001 - the __str__ of a user's exception may raise anything
        text = f"{type(error).__name__}, whose message can't be formatted"
    own = ("<frozen", os.path.dirname(os.path.dirname(__file__)))
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return text.encode(errors="replace").decode()[:MAX_FAILURE_CHARACTERS] + place
