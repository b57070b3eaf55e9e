"""The actors that host the workers: a process that holds their handles imports none of what the workers need."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import ray

from infra.ray.actors import call, create_actor, kill_actor, start_actor
from infra.workers.actor import WorkerActor, actor_class
from infra.workers.launch import _CLASSES, Role
from schemas.errors import ModelError

pytestmark = pytest.mark.slow


@pytest.fixture
def worker(ray_cluster: None) -> Iterator[Any]:
    yield create_actor("hosted", actor_class("tests.infra.hosted_worker:Worker", "add", "two", "fail"), 3)
    kill_actor("hosted")


def test_calls_reach_the_worker(worker: Any) -> None:
    assert asyncio.run(call(worker, "add", 4)) == 7
    assert ray.get(worker.two.options(num_returns=2).remote()) == [3, 4]
    with pytest.raises(ModelError, match="no such model"):
        asyncio.run(call(worker, "fail"))


def test_a_process_that_holds_a_handle_imports_no_torch(worker: Any) -> None:
    class Holder:
        def has_imported_torch(self, worker: Any) -> bool:
            assert ray.get(worker.add.remote(1)) == 4
            return "torch" in sys.modules

    assert not ray.get(start_actor(Holder).has_imported_torch.remote(worker))
    assert ray.get(worker.__ray_call__.remote(lambda _: "torch" in sys.modules))


def test_the_flows_of_a_run_import_no_torch() -> None:
    code = "import sys, flows.cli.demo, flows.train; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("role", _CLASSES)
def test_every_role_has_its_workers_name_and_methods(role: Role) -> None:
    actor = _CLASSES[role]
    module, _, name = actor.worker.partition(":")  # type: ignore[attr-defined]
    worker = getattr(import_module(module), name)
    assert actor.__name__ == worker.__name__
    forwarded = {name for name in vars(actor) if not name.startswith("_")} - set(vars(WorkerActor))
    assert {name for name in forwarded if not callable(getattr(worker, name, None))} == set()
