"""Pools of the environments in `faulty_environments`, and the replies that they should give."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
