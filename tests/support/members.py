"""Objects in processes of their own, which are forked from one that has imported what they need.

A process costs its tests a few milliseconds instead of the seconds of importing torch. For what needs no Ray actor.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any


class MemberLostError(Exception):
    """The process has died during a call."""


class Member:
    """An object in a process of its own, which makes one call after another.

    Args:
        of: Its class, as "module:class". The first member's module is imported before the processes are forked.
        *arguments: Its constructor's arguments.
    """

    def __init__(self, of: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", of.partition(":")[0]])  # a new process imports its parent's script
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, of, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1)

    def start(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call; its error is the future's."""
        return self._thread.submit(self._call, method, arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; return its result, or raise its error."""
        return self.start(method, *arguments).result()

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._thread.shutdown()

    def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        try:
            self._connection.send((method, arguments))
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise MemberLostError(f"a member died during {method!r}") from None
        if error is not None:
            raise error
        return result


def _serve(connection: Connection, of: str, arguments: Sequence[Any]) -> None:
    module, _, name = of.partition(":")
    made = getattr(import_module(module), name)(*arguments)
    while True:
        try:
            method, given = connection.recv()
        except EOFError:  # the test's process has ended
            return
        try:
            connection.send((getattr(made, method)(*given), None))
        except Exception as error:  # noqa: BLE001  the caller's to raise
            connection.send((None, error))
