"""Functions that a model may call."""

import asyncio
import datetime
import sys
import threading
from typing import Annotated, Any, Literal


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one,
            which may be left out.

    Returns:
        The sum.
    """
    return a + b


async def fetch(key: str) -> dict[str, Any]:
    """Look a key up.

    Args:
        key: What to look up.
    """
    await asyncio.sleep(0)
    return {"key": key, "at": datetime.date(2026, 1, 2), "é": None}


def later(key: str):
    """Look a key up, by a function that returns a coroutine.

    Args:
        key: What to look up.
    """
    return fetch(key)


def echo(task: str, seed: int) -> str:
    """Repeat.

    Args:
        task: A text.
        seed: How often.
    """
    return task * seed


def now() -> str:
    """Return the time."""
    return "noon"


def fail(how: Literal["raise", "exit", "stop", "long", "unprintable", "circular", "surrogate", "object"]) -> Any:
    """Fail.

    Args:
        how: In which way.
    """

    class Unprintable(Exception):
        def __str__(self):
            raise self

    if how == "raise":
        raise KeyError("nothing")
    if how == "exit":
        sys.exit("bye")
    if how == "stop":
        next(iter(()))
    if how == "long":
        raise ValueError("x" * 5000)
    if how == "unprintable":
        raise Unprintable
    if how == "circular":
        value = []
        value.append(value)
        return value
    if how == "object":
        return {"lines": (line for line in "ab")}
    return "\ud800"


def typed(
    text: str,
    number: float,
    flag: bool,
    items: list[int],
    table: dict[str, float],
    unit: Literal["C", "F", 1],
    either: int | None,
    old: str | None,
    anything: Any,
    bare: list,
    open: dict,
    noted: Annotated[int, "note"],
) -> str:
    """Take everything.

    Args:
        text: A text.
        number: A number.
        flag: A flag.
        items: Items.
        table: A table.
        unit: A unit.
        either: A number or nothing.
        old: A text or nothing.
        anything: Anything.
        bare: A list.
        open: An object.
        noted: A number.
    """
    return "taken"


meetings = threading.Barrier(2)


def meet() -> str:
    """Return when another one has come, too."""
    meetings.wait()
    return "met"


plus = add
