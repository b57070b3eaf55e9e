"""The program of a reward process: loads one reward function and scores the items that its parent sends.

Messages are pickled: first the reward's config, answered by `{"ready": true, "is_concurrent": bool}` or an error
(`infra.processes.calls.Parent`); then each a `(number, RewardItem)`, answered as soon as it is scored.
"""

import asyncio
import math
import pickle
from dataclasses import asdict

from infra.processes.calls import Call, CallError, Parent
from infra.processes.threads import ThreadPerCall
from rl_core.rewards import (
    RewardItem,
    RewardOutcome,
    describe_timeout,
    is_concurrent,
    load_reward,
    prepare,
    score_one,
    turns_of,
)
from rl_core.user_code import in_own_loop
from schemas.errors import UserError


def main(connection: int, memory: int) -> None:
    """Serve the parent at the other end of a socket until it closes.

    Args:
        connection: The socket's descriptor.
        memory: The descriptor of the memory in which the parent sees what this process does.
    """
    asyncio.run(_serve(Parent(connection, memory)))


async def _serve(parent: Parent) -> None:
    messages = parent.messages()
    config, is_first = pickle.loads(await anext(messages))  # noqa: S301 - from the parent, not from disk
    limit_seconds = math.inf if config.timeout_seconds is None else config.timeout_seconds
    try:
        with in_own_loop():
            function = load_reward(config)
        if is_first:  # else it was prepared in the process whose place this one takes
            await prepare(function)
    except UserError as error:
        await parent.refuse(type(error).__name__, str(error))
        return
    loop = asyncio.get_running_loop()
    turns = turns_of(function) if is_concurrent(function) else asyncio.Lock()  # answered before the next begins
    loop.set_default_executor(threads := ThreadPerCall(loop))

    async def score(number: int, item: RewardItem) -> None:
        async with turns:  # only then does its time begin
            try:
                with Call(parent.state, number, limit_seconds) as call:
                    outcome = await call.finish(score_one(function, item))
            except CallError:
                outcome = RewardOutcome.timed_out(limit_seconds, describe_timeout(function))
            parent.answer(number=number, num_hung_threads=threads.num_hung, **asdict(outcome))

    parent.answer(ready=True, is_concurrent=is_concurrent(function))
    async with asyncio.TaskGroup() as calls:
        async for message in messages:
            calls.create_task(score(*pickle.loads(message)))  # noqa: S301
