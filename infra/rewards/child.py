"""The program of a reward process: loads one reward function and scores the items that its parent sends.

Messages from the parent are pickled and preceded by their length (`MESSAGE_BYTES`): first the reward's config, then
lists of `(number, RewardItem)`. Answers are lines of JSON: first `{"concurrent": bool}`, or the message and class of an
error as `{"error": str, "type": str}`, then one line per item as soon as it is scored.
"""

import asyncio
import json
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO

from infra.processes.lifeline import end_with_parent
from rl_core.rewards import (
    AnyRewardFunction,
    RewardItem,
    RewardOutcome,
    is_concurrent,
    load_reward,
    prepare,
    score_one,
    turns_of,
)
from schemas.errors import UserError

MESSAGE_BYTES = struct.Struct("!Q")  # the length of the message that follows

Chunk = Sequence[tuple[int, RewardItem]]


def main(descriptor: int) -> None:
    """Serve the parent at the other end of a socket until it closes."""
    end_with_parent()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=partial(_replace_by_nothing, descriptor))
    with connection.makefile("rb") as messages, suppress(EOFError), asyncio.Runner() as runner:
        config = _read(messages)
        try:
            function = load_reward(config)
            runner.run(prepare(function))
        except UserError as error:
            connection.sendall(_line(error=str(error), type=type(error).__name__))
            return
        connection.sendall(_line(concurrent=is_concurrent(function)))
        if is_concurrent(function):
            runner.run(_score_concurrently(connection, function, config.timeout_seconds))
            return
        while True:
            runner.run(_score_in_order(connection, function, _read(messages), config.timeout_seconds))


def _replace_by_nothing(descriptor: int) -> None:
    """Close the parent's socket in a process that a reward function forked: it must neither read nor answer."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


async def _score_in_order(
    connection: socket.socket, function: AnyRewardFunction, chunk: Chunk, timeout_seconds: float | None
) -> None:
    """Answer each item before the next begins: the parent takes the first unanswered item as the one being scored."""
    for number, item in chunk:
        connection.sendall(_answer(number, await score_one(function, item, timeout_seconds)))


async def _score_concurrently(
    connection: socket.socket, function: AnyRewardFunction, timeout_seconds: float | None
) -> None:
    """Begin every item as soon as it arrives, while others are still being scored."""
    reader, writer = await asyncio.open_connection(sock=connection)
    turns = turns_of(function)

    async def score(number: int, item: RewardItem) -> None:
        async with turns:  # only then does its time begin
            writer.write(_answer(number, await score_one(function, item, timeout_seconds)))

    async with asyncio.TaskGroup() as calls:
        with suppress(EOFError):
            while True:
                (num_bytes,) = MESSAGE_BYTES.unpack(await reader.readexactly(MESSAGE_BYTES.size))
                chunk: Chunk = pickle.loads(await reader.readexactly(num_bytes))  # noqa: S301 - from the parent
                for number, item in chunk:
                    calls.create_task(score(number, item))


def _read(messages: BinaryIO) -> Any:
    header = messages.read(MESSAGE_BYTES.size)
    if len(header) < MESSAGE_BYTES.size:
        raise EOFError
    return pickle.loads(messages.read(*MESSAGE_BYTES.unpack(header)))  # noqa: S301 - from the parent, not from disk


def _answer(number: int, outcome: RewardOutcome) -> bytes:
    return _line(item=number, **asdict(outcome))


def _line(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"
