"""The actors that host the workers: a process that holds their handles imports none of what the workers need."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from infra.ray.actors import call, create_actor, kill_actors
from infra.ray.worker_logs import MAX_LINES
from infra.workers.actor import actor_class
from schemas.errors import GpuMemoryError, ModelError


@pytest.fixture(scope="module")
def worker(ray_cluster: None) -> Iterator[Any]:
    hosted = actor_class("tests.support.hosted_worker:Worker", "add", "report", "fail", "exhaust")
    yield create_actor("run/hosted-0", hosted, 3)
    kill_actors(["run/hosted-0"])


def test_calls_reach_the_worker(worker: Any) -> None:
    assert asyncio.run(call(worker, "add", 4)) == 7
    with pytest.raises(ModelError, match="no such model"):
        asyncio.run(call(worker, "fail"))
    with pytest.raises(
        GpuMemoryError, match=r"'exhaust' of a worker failed: CUDA out of memory.*Lower packing"
    ) as failed:
        asyncio.run(call(worker, "exhaust"))
    assert failed.value.gpu_bytes == round(79.1 * 2**30)
    assert "hosted_worker.py" in str(failed.value.__cause__)  # where it was raised, for the log


def test_log_lines_come_with_the_result_of_the_call(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert asyncio.run(call(worker, "report", 1)) == 1
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("elsewhere", "WARNING", "hosted-0: not ours, but a warning"),
        ("infra.hosted", "INFO", "hosted-0: line 0"),
    ]
    caplog.clear()
    with pytest.raises(ModelError, match="no such model") as error:
        asyncio.run(call(worker, "fail"))
    assert caplog.messages == ["hosted-0: about to fail"]
    assert not vars(error.value)


def test_a_flood_of_log_lines_is_cut_and_says_so(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    asyncio.run(call(worker, "report", 2 * MAX_LINES))
    assert len(caplog.messages) == MAX_LINES + 1
    assert caplog.messages[-1] == f"hosted-0: {MAX_LINES + 1} more lines are not shown"
    caplog.clear()
    asyncio.run(call(worker, "add", 1))
    assert not caplog.messages


def test_a_process_that_holds_a_handle_imports_no_torch(worker: Any) -> None:
    class Holder:
        def has_imported_torch(self, worker: Any) -> bool:
            assert ray.get(worker.add.remote(1)) == 4
            return "torch" in sys.modules

    assert not ray.get(ray.remote(num_cpus=0)(Holder).remote().has_imported_torch.remote(worker))
    assert ray.get(worker.__ray_call__.remote(lambda _: "torch" in sys.modules))
