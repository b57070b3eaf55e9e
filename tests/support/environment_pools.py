"""Pools of the environments in `faulty_environments`, the replies that they should give, and what failures cost."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.environments.pool import EnvironmentClass, EnvironmentPool, Reply
from rl_core.environments.base import Task
from schemas.config.environment import TurnLimits

LIMIT_SECONDS = 3.0  # a thousand times what a call that doesn't hang takes
MODULE = "tests.support.faulty_environments"


@contextmanager
def opened(name: str, arguments: Mapping[str, object] | None = None, **changes: object) -> Iterator[EnvironmentPool]:
    """Hold a started pool (one process, limits of `LIMIT_SECONDS`) of a class of `faulty_environments`."""
    fields = {"num_processes": 1, "reset_timeout_seconds": LIMIT_SECONDS, "step_timeout_seconds": LIMIT_SECONDS}
    limits = TurnLimits.model_validate(fields | changes)
    pool = EnvironmentPool(EnvironmentClass(name if ":" in name else f"{MODULE}:{name}", limits, arguments or {}))
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


def task(answer: str = "") -> Task:
    return {"prompt": [{"role": "user", "content": "?"}], "answer": answer, "info": {}}


def open_rows(pool: EnvironmentPool, *answers: str) -> dict[int, Reply]:
    """Open rows 0, 1, ..., with their numbers as seeds."""
    for row, answer in enumerate(answers):
        pool.open(row, task(answer), seed=row)
    return pool.wait()


def step_rows(pool: EnvironmentPool, actions: Mapping[int, str] | list[str]) -> dict[int, Reply]:
    for row, action in actions.items() if isinstance(actions, Mapping) else enumerate(actions):
        pool.step(row, action)
    return pool.wait()


def counted(row: int, *said: str) -> tuple[tuple[str, ...], float, dict[str, float]]:
    """Return observations, reward and metrics of row `row` of `Counting` after these actions."""
    count = row + len(said)
    return (f"{count}: {','.join(word[:10] for word in said)}",), count / 2, {"said": len(said)}


def contents(reply: Reply) -> tuple[tuple[str, ...], float, dict[str, float]]:
    assert reply.failure is None, reply.failure
    return reply.observations, reply.reward, dict(reply.metrics)


def kinds(replies: Mapping[int, Reply]) -> dict[int, str]:
    return {row: reply.failure.kind for row, reply in replies.items() if reply.failure is not None}


def assert_a_failed_call_costs_only_its_row(name: str, action: str, kind: str, message: str) -> None:
    """Assert that a failed call ends its row alone, and that what was said to other rows is said to them again.

    Args:
        name: The environment's class.
        action: What makes a call fail.
        kind: The kind of its failure.
        message: The beginning of the failure's message, or a pattern of it.
    """
    with opened(name) as pool:
        open_rows(pool, *"abcde")
        step_rows(pool, list("01234"))
        replies = step_rows(pool, ["x", "y", action, "z", "w"])
        assert kinds(replies) == {2: kind}
        failure = replies[2].failure
        assert failure is not None
        assert failure.message.startswith(message) or re.match(message, failure.message)
        for row, said in {0: "x", 1: "y", 3: "z", 4: "w"}.items():
            assert contents(replies[row]) == counted(row, str(row), said)
        replies = step_rows(pool, ["1", "1", "1", action, "1"])
        assert contents(replies[2]) == counted(2, "2", "1")
        assert kinds(replies) == {3: kind}


def assert_a_failed_reset_costs_only_its_row(name: str, fault: str) -> None:
    """Assert that a failed reset ends its row alone, in whose place another can be opened."""
    with opened(name) as pool:
        replies = open_rows(pool, "a", fault, "c")
        assert list(kinds(replies)) == [1]
        assert replies[2].observations == ("c from 2",)
        assert kinds(step_rows(pool, ["x", "y", "z"])).keys() == {1}
        pool.end(1)
        pool.open(1, task("b"), seed=7)
        assert pool.wait()[1].observations == ("b from 7",)


def assert_a_failed_replay_costs_only_its_row(folder: Path, fault: str, kind: str) -> None:
    """Assert that an environment that can't be made again after its process was lost ends its row alone."""
    with opened("MadeOnce", {"folder": str(folder)}) as pool:
        open_rows(pool, *"abc")
        step_rows(pool, {1: f"later {fault}"})
        assert kinds(step_rows(pool, {2: "leave"})) == {2: "died"}
        for _ in range(2):
            replies = step_rows(pool, ["x", "y", "z"])
            assert kinds(replies) == {1: kind}
            failure = replies[1].failure
            assert failure is not None
            assert failure.message.startswith("when it was made again: ")


def assert_a_failed_close_costs_nothing(fault: str) -> None:
    """Assert that an environment that can't be closed changes no other row."""
    with opened("Counting") as pool:
        open_rows(pool, *"ab")
        step_rows(pool, [f"close {fault}", "1"])
        pool.end(0)
        assert contents(step_rows(pool, {1: "2"})[1]) == counted(1, "1", "2")
