"""A stopped actor, which Ray takes for alive, is killed, so that nobody waits for it; a lost Ray is noticed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from flows.lifecycle.session import while_ray_lives
from infra.ray import actors, health
from infra.ray.actors import call, create_actor, find_actor, kill_actors
from schemas.errors import RayLostError, WorkerLostError


@pytest.fixture
def worker(ray_cluster: None) -> Iterator[Any]:
    class Worker(health.Pingable):
        def process_id(self) -> int:
            return os.getpid()

    yield create_actor("stopped", Worker, options=health.ACTOR_OPTIONS)
    kill_actors(["stopped"])


def test_a_stopped_actor_is_killed_and_its_callers_get_an_error(worker: Any) -> None:
    os.kill(asyncio.run(call(worker, "process_id")), signal.SIGSTOP)
    waiting = worker.process_id.remote()
    with health.monitored_actors(["stopped", "not there"], timeout_seconds=1.0), pytest.raises(WorkerLostError):
        asyncio.run(actors.resolve(waiting, "process_id"))
    assert find_actor("stopped") is None


def test_work_that_waits_for_a_lost_ray_is_cancelled(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []

    async def wait_in_vain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    context = ray.get_runtime_context()
    monkeypatch.setattr(type(context), "gcs_address", property(lambda _: "127.0.0.1:9"))  # nothing listens there
    with pytest.raises(RayLostError, match=r"Ray at 127\.0\.0\.1:9 is gone"):
        asyncio.run(while_ray_lives(wait_in_vain()))
    assert cancelled == [True]
