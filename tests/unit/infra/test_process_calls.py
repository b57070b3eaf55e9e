"""What a process shows of its calls: the mark in shared memory, and coroutines that hold it."""

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
from infra.processes.calls import Call, Mark, MarkedCoroutine, Running


@pytest.fixture
def memory() -> Iterator[int]:
    memory = os.memfd_create("mark")
    os.truncate(memory, Mark.SIZE)
    yield memory
    os.close(memory)


WRITER = """
import sys, time
from infra.processes.calls import Mark, Running

mark = Mark(int(sys.argv[1]))
mark.beat()
mark.running = Running(7, time.monotonic(), 1.0)
print("began", flush=True)
for _ in range(100_000):
    mark.beat()
    mark.running = Running(7, time.monotonic(), 1.0)
"""


def test_a_mark_is_never_read_half_written(memory: int) -> None:
    mark, began = Mark(memory), time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(memory)], pass_fds=[memory], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"began\n"
        while writer.poll() is None:
            assert mark.last_beat >= began
            assert mark.running.deadline >= began
        assert mark.running.number == 7


def test_a_fork_writes_no_mark(memory: int) -> None:
    parent, fork = Mark(memory), Mark(memory)
    fork.running = Running(3, 4.0, 5.0, is_remade=True)
    assert parent.running == Running(3, 4.0, 5.0, is_remade=True)
    fork.detach()
    fork.running = Running()
    assert parent.running.number == 3


def test_a_coroutine_holds_the_mark_whenever_it_runs(memory: int) -> None:
    mark, seen = Mark(memory), []

    async def work(event: asyncio.Event) -> str:
        seen.append(mark.running.number)
        await event.wait()
        seen.append(mark.running.number)
        return "done"

    async def play() -> None:
        event = asyncio.Event()
        held = MarkedCoroutine(work(event), Call(mark, 7, 10.0))
        assert inspect.getcoroutinestate(held) == inspect.CORO_CREATED  # type: ignore[arg-type]

        async def outer() -> str:
            return await held

        task = asyncio.create_task(outer())
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(held) == inspect.CORO_SUSPENDED  # type: ignore[arg-type]
        assert mark.running.number == -1
        event.set()
        assert await task == "done"

    asyncio.run(play())
    assert seen == [7, 7]


def test_what_a_call_leaves_running_has_its_limit_again(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now))
    mark, deadlines = Mark(memory), []

    async def play() -> None:
        nonlocal now
        asyncio.get_running_loop().set_task_factory(calls.create_task)
        event, left = asyncio.Event(), []

        async def rest() -> None:
            await event.wait()
            deadlines.append(mark.running.deadline)

        async def work() -> None:
            left.append(asyncio.create_task(rest()))

        with Call(mark, 7, 10.0) as call:
            await call.finish(work())
        now += 100.0
        event.set()
        await left[0]

    asyncio.run(play())
    assert deadlines == [210.0]
