"""What a process shows of its calls: its state in shared memory, and coroutines that are in it."""

import asyncio
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from infra.processes import calls
from infra.processes.calls import Call, MarkedCoroutine, Running, SharedCallState


@pytest.fixture
def memory() -> Iterator[int]:
    memory = os.memfd_create("calls")
    os.truncate(memory, SharedCallState.SIZE)
    yield memory
    os.close(memory)


WRITER = """
import sys, time
from infra.processes.calls import SharedCallState, Running

state = SharedCallState(int(sys.argv[1]))
state.beat()
state.running = Running(7, time.monotonic(), 1.0)
print("began", flush=True)
for _ in range(100_000):
    state.beat()
    state.running = Running(7, time.monotonic(), 1.0)
"""


def test_a_mark_is_never_read_half_written(memory: int) -> None:
    state, began = SharedCallState(memory), time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(memory)], pass_fds=[memory], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"began\n"
        while writer.poll() is None:
            assert state.last_beat >= began
            assert state.running.deadline >= began
        assert state.running.number == 7


def test_a_fork_writes_no_mark(memory: int) -> None:
    parent, fork = SharedCallState(memory), SharedCallState(memory)
    fork.running = Running(3, 4.0, 5.0, is_remade=True)
    assert parent.running == Running(3, 4.0, 5.0, is_remade=True)
    fork.detach()
    fork.running = Running()
    assert parent.running.number == 3


def test_a_coroutine_holds_the_mark_whenever_it_runs(memory: int) -> None:
    state, seen = SharedCallState(memory), []

    async def work(event: asyncio.Event) -> str:
        seen.append(state.running.number)
        await event.wait()
        seen.append(state.running.number)
        return "done"

    async def play() -> None:
        event = asyncio.Event()
        held = MarkedCoroutine(work(event), Call(state, 7, 10.0))
        assert inspect.getcoroutinestate(held) == inspect.CORO_CREATED  # type: ignore[arg-type]

        async def outer() -> str:
            return await held

        task = asyncio.create_task(outer())
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(held) == inspect.CORO_SUSPENDED  # type: ignore[arg-type]
        assert state.running.number == -1
        event.set()
        assert await task == "done"

    asyncio.run(play())
    assert seen == [7, 7]


def test_what_a_call_leaves_running_has_its_limit_again(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now))
    state, deadlines = SharedCallState(memory), []

    async def play() -> None:
        nonlocal now
        asyncio.get_running_loop().set_task_factory(calls.create_task)
        event, left = asyncio.Event(), []

        async def rest() -> None:
            await event.wait()
            deadlines.append(state.running.deadline)

        async def work() -> None:
            left.append(asyncio.create_task(rest()))

        with Call(state, 7, 10.0) as call:
            await call.finish(work())
        now += 100.0
        event.set()
        await left[0]

    asyncio.run(play())
    assert deadlines == [210.0]
