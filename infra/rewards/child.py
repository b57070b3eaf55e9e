"""The program of a reward process: loads one reward function and scores what its parent sends.

Messages from the parent are pickled: the reward's config first, then lists of `(number, RewardItem)`. Answers are lines
of JSON: `{"concurrent": bool}` or `{"error": str}` first, then one for each item, as soon as it is scored.
"""

import asyncio
import fcntl
import json
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rl_core.rewards import RewardFunction, RewardItem, is_concurrent, load_reward, score_one
from schemas.errors import RewardImportError

LIFELINE = 0  # standard input: a pipe that the parent holds open and never writes to


def main(descriptor: int) -> None:
    """Serve the parent at the other end of a socket until that closes."""
    end_with_parent()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    with connection.makefile("rb") as messages, asyncio.Runner() as runner:
        config = pickle.load(messages)  # noqa: S301 - from the parent, not from disk
        try:
            function = load_reward(config)
        except RewardImportError as error:
            _answer(connection, error=str(error))
            return
        _answer(connection, concurrent=is_concurrent(function))
        with suppress(EOFError):
            while True:
                chunk = pickle.load(messages)  # noqa: S301 - as above
                runner.run(_score(connection, function, chunk, config.timeout_seconds))


def end_with_parent() -> None:
    """Have the kernel end this process and those that it started when the lifeline closes.

    The kernel sends the signal to the whole process group, and its default action needs no Python: a reward function
    that holds the interpreter is ended as well.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(LIFELINE, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(LIFELINE, fcntl.F_SETFL, fcntl.fcntl(LIFELINE, fcntl.F_GETFL) | os.O_ASYNC)
    lifeline = select.poll()
    lifeline.register(LIFELINE, 0)
    if lifeline.poll(0):  # it had closed before
        sys.exit(1)


async def _score(
    connection: socket.socket,
    function: RewardFunction,
    chunk: Sequence[tuple[int, RewardItem]],
    timeout_seconds: float | None,
) -> None:
    async def answer(number: int, item: RewardItem) -> None:
        outcome = await score_one(function, item, timeout_seconds)
        _answer(connection, item=number, reward=outcome.reward, parts=outcome.parts, failure=outcome.failure)

    if is_concurrent(function):
        await asyncio.gather(*(answer(number, item) for number, item in chunk))
        return
    for number, item in chunk:  # in order: the parent takes the first without an answer for the one at work
        await answer(number, item)


def _answer(connection: socket.socket, **values: Any) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")
