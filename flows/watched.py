"""Work that is given up when something else happens first."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
Event = TypeVar("Event")


async def unless(event: Coroutine[Any, Any, Event], work: Coroutine[Any, Any, Result]) -> Result | Event:
    """Await `work`; if `event` ends first, cancel `work`, await its clean-up, and return or raise what `event` does."""
    running, watching = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else watching.result()
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
