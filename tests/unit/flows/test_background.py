"""Work in the background of other work: its result, its errors, and what becomes of it if the other ends."""

import asyncio

import pytest

from flows.step import in_background


async def succeed(events: list[str], turns: int) -> str:
    """Go on for some turns of the event loop."""
    try:
        for _ in range(turns):
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        events.append("cancelled")
        raise
    events.append("done")
    return "result"


async def fail() -> None:
    raise ValueError("of the background")


def test_the_result_of_work_in_the_background() -> None:
    async def main() -> str:
        async with in_background(succeed([], 3)) as work:
            await asyncio.sleep(0)
            return await work

    assert asyncio.run(main()) == "result"


def test_a_failed_block_waits_for_the_work_and_raises_its_own_error() -> None:
    events: list[str] = []

    async def main() -> None:
        async with in_background(succeed(events, 5)):
            await asyncio.sleep(0)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        asyncio.run(main())
    assert events == ["done"]


def test_work_that_fails_raises_where_it_is_awaited() -> None:
    reached: list[str] = []

    async def main() -> None:
        async with in_background(fail()) as work:
            for _ in range(3):
                await asyncio.sleep(0)
            reached.append("the end of the other work")
            await work

    with pytest.raises(ValueError, match="of the background"):
        asyncio.run(main())
    assert reached


@pytest.mark.parametrize("fails_first", [False, True], ids=["in the block", "while a failed block waits"])
def test_a_cancelled_block_cancels_the_work_and_waits_for_it(fails_first: bool) -> None:
    events: list[str] = []

    async def block() -> None:
        async with in_background(succeed(events, 1000)):
            await asyncio.sleep(0)
            if fails_first:
                raise KeyError("of the block")
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(block())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert events == ["cancelled"]

    asyncio.run(main())
