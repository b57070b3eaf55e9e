"""Looks at nodes, some of which are drained or answer nothing, in a Ray that is played."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import TaskUnschedulableError

from infra.workers import nodes, placement
from infra.workers.nodes import leave_drained, wait_for_drain


def name(number: int) -> str:
    """Return a node's id."""
    return f"{number + 1:056x}"


class Ray:
    """A cluster of ten nodes, and a clock: a node answers at once, but for the drained and the silent ones."""

    exceptions = nodes.ray.exceptions

    def __init__(self) -> None:
        self.nodes = [name(number) for number in range(10)]
        self.drained, self.silent = set[str](), set[str]()
        self.now, self.num_functions = 100.0, 0
        self.asked: list[str] = []

    def remote(self, **_: object) -> Any:
        self.num_functions += 1

        def options(scheduling_strategy: Any, enable_task_events: bool) -> Any:
            assert not enable_task_events

            def remote() -> str:
                self.asked.append(scheduling_strategy.node_id)
                return self.asked[-1]

            return SimpleNamespace(remote=remote)

        return lambda _function: SimpleNamespace(options=options)

    def wait(self, refs: Sequence[str], num_returns: int = 1, timeout: float = 0) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if ref not in self.silent]
        if len(done) < num_returns:
            self.now += timeout
        return done, [ref for ref in refs if ref in self.silent]

    def get(self, ref: str) -> None:
        if ref in self.drained:
            raise TaskUnschedulableError("drained")

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: name(0))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    played = Ray()
    monkeypatch.setattr(nodes, "ray", played)
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: played.now))
    monkeypatch.setattr(nodes, "living_nodes", lambda: dict.fromkeys(played.nodes, "10.0.0.1"))
    monkeypatch.setattr(placement, "_left", set())
    return played


def look(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, *, num_looks: int, drained: set[str]
) -> tuple[set[str], list[float]]:
    """Wait for a drain after so many looks; return what was found, and when each look began."""
    begun = list[float]()

    async def sleep(seconds: float) -> None:
        ray.now += seconds
        begun.append(ray.now)
        if len(begun) == num_looks:
            ray.drained = drained

    monkeypatch.setattr(nodes, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    return asyncio.run(wait_for_drain(lambda: ray.nodes)), begun


def test_all_drained_nodes_are_found_by_one_function(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    found, begun = look(ray, monkeypatch, num_looks=4, drained={name(0), name(3), name(7)})
    assert found == {name(3), name(7)}  # not the driver's own, which tells its processes
    assert begun == [103, 106, 109, 112]
    assert ray.num_functions == 1
    assert sorted(ray.asked) == sorted(ray.nodes[1:] * 4)


def test_a_node_that_does_not_answer_slows_down_no_look_at_the_others(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.silent = {name(5)}
    found, begun = look(ray, monkeypatch, num_looks=4, drained={name(3)})
    assert found == {name(3)}
    assert begun == [103, 109, 112, 115]  # the first one waits for it for three seconds, no later one does
    assert ray.asked.count(name(5)) == 1


def test_looks_that_take_long_take_a_tenth_of_the_time(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.silent = {*ray.nodes[4:]}
    _, begun = look(ray, monkeypatch, num_looks=2, drained={name(3)})
    assert begun == [103, 103 + 3 + 20]


def test_what_is_drained_is_left_though_no_worker_is_there(ray: Ray) -> None:
    ray.drained = {name(0), name(3), name(7)}
    leave_drained()
    assert placement._left == {name(3), name(7)}
