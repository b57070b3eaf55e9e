"""The Prefect server is away when a run of a deployment or of a pipeline starts or ends."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.deployments import entrypoints
from flows.deployments.entrypoints import hold_pool
from flows.pipeline import _train_all
from flows.pipeline_plan import PlannedRun
from schemas.config.run import RunConfig
from schemas.step import RunSummary
from tests.support.configs import run_config
from tests.support.stand_in_prefect import LimitServer, answered_by
from tests.support.sweeps import finish, sweep_plan

Train = Callable[[RunConfig, str], Coroutine[Any, Any, RunSummary]]


@pytest.fixture(autouse=True)
def of_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.UUID(int=1)))
    for module in ("pipeline", "deployments.entrypoints"):
        monkeypatch.setattr(f"flows.{module}.get_run_logger", logging.getLogger)


def at_once(config: RunConfig, *, shows_queue: bool) -> AbstractAsyncContextManager[None]:
    return nullcontext()


def server(**dropped: int) -> type[LimitServer]:
    """A server that doesn't answer the first requests of these names, so many of each."""
    names = {name.replace("_", "-"): number for name, number in dropped.items()}
    return type("Server", (LimitServer,), {"dropped": names, "requests": []})


def test_a_slot_is_waited_for_and_the_end_of_the_block_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answering = server(sluice_gpus=1, increment_with_lease=1, decrement_with_lease=2)
    config = run_config(tmp_path, runtime={"pool": "gpus"})
    done = list[int]()

    async def run() -> None:
        async with hold_pool(config):
            done.append(1)
        async with hold_pool(config):
            raise KeyError("of the block")

    with answered_by(answering), pytest.raises(KeyError, match="of the block"):
        asyncio.run(run())
    assert done == [1]
    assert answering.dropped == dict.fromkeys(answering.dropped, 0)
    assert answering.requests.count("increment-with-lease") == 2
    assert caplog.text.count("the slot of the pool 'gpus' was not given back") == 2


def test_a_run_that_has_finished_when_the_server_is_lost_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(config: RunConfig, run_id: str) -> RunSummary:
        finish(config, run_id)
        raise httpx.ReadError("the server is gone")

    monkeypatch.setattr(entrypoints, "train_policy", train)
    config = run_config(tmp_path, runtime={"pool": "ended"})
    with answered_by(server(decrement_with_lease=1)):
        state = asyncio.run(entrypoints._train_in_turn(config, "finished"))
    assert (state.name, state.message) == ("Completed", f"{config.steps} steps, reward 1.000 to 1.000")


def test_a_lost_end_of_a_run_of_a_pipeline_stops_no_other_and_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sweep_plan(tmp_path, num_runs=3, max_runs=3)
    calls, others_done = list[str](), asyncio.Event()

    def of_run(run: PlannedRun, **_: object) -> Train:
        async def train(config: RunConfig, run_id: str) -> RunSummary:
            calls.append(run_id)
            if run_id == "run-0":
                await others_done.wait()
                return finish(config, run_id)
            if calls.count(run_id) == 1:
                if run_id == "run-1":
                    finish(config, run_id)  # the report of its end was lost; that of the other one's start
                raise httpx.ReadError("the server is gone")
            others_done.set()
            return finish(config, run_id)

        return train

    monkeypatch.setattr("flows.pipeline._train_flow", of_run)
    with answered_by(server()):
        asyncio.run(_train_all(plan, "grpo", at_once))
    assert sorted(calls) == ["run-0", "run-1", "run-2", "run-2"]
    assert all(run.directory.summary() is not None for run in plan.all_runs)
