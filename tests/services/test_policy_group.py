"""Policy ranks as Ray actors: two train as one, a lost rank ends the group, any number resumes from a checkpoint."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from infra.engines.embedded.engine import TransformersEngine
from infra.models.load import load_model
from infra.ray.actors import call
from infra.ray.ranks import WorkerGroup
from infra.stores.open import open_store
from infra.weights.endpoint import WeightSyncEndpoint
from infra.workers.launch import find_group, get_group, worker_name
from infra.workers.placement import check_resources
from infra.workers.policy import PolicyWorker
from rl_core.planning import plan_forward
from rl_core.planning.plan import rows_by_rank
from rl_core.views import decode_ints, with_column
from schemas.batch import BatchHandle
from schemas.errors import ConfigError, NonFiniteError, WorkerLostError
from schemas.step import RunHandle, UpdateReport
from schemas.weights import WeightsRoute
from tests.support.policy_runs import Runs, plan_of, put_rows, with_advantages
from tests.support.tiny import make_tiny_data, make_tiny_model

STEPS, SAVED = 5, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group")
    make_tiny_model(folder / "model")
    make_tiny_data(folder / "train.parquet", 8)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path, ray_cluster: None) -> Iterator[Runs]:
    runs = Runs(folder)
    yield runs
    runs.kill_workers()


async def scored(run: RunHandle, group: "WorkerGroup | Alone", step: int) -> BatchHandle:
    """Return a step's rows with the policy's own log-probs, which the ranks put."""
    batch = put_rows(run, step)
    plan = plan_forward(
        decode_ints(batch.prompt_lengths),
        decode_ints(batch.response_lengths),
        num_ranks=len(group.ranks),
        token_budget=run.config.packing.token_budget,
    )
    results = await group.call("score", batch, plan, step)
    rows = rows_by_rank(plan)
    return with_column(batch, results[0].put.dtypes, [result.put.chunk for result in results], rows)


async def train_step(run: RunHandle, group: "WorkerGroup | Alone", step: int) -> list[UpdateReport]:
    batch = with_advantages(run, await scored(run, group, step))
    return await group.call("update", batch, plan_of(run, batch), step)


async def weights(run: RunHandle, group: "WorkerGroup | Alone", version: int) -> dict[str, torch.Tensor]:
    """Return the version's whole weights, as a rollout worker receives them, loads them, and probes its engine."""
    if isinstance(group, Alone):
        with group.ranks[0].weights(version) as alone:
            return {name: tensor.clone() for name, tensor in alone.items()}
    engine = TransformersEngine(load_model(run.config.model))
    endpoint = WeightSyncEndpoint(run.run_id, torch.device("cpu"), run.config, engine)
    sender, *_ = group.ranks
    rendezvous = await call(sender, "open_weight_rendezvous", 1)
    joining = asyncio.to_thread(endpoint.join, rendezvous, 1, on_gpus=False)
    await asyncio.gather(call(sender, "init_weight_group", rendezvous, 0, False), joining)
    route = WeightsRoute(transport="broadcast", on_gpus=False)
    loading = asyncio.create_task(asyncio.to_thread(endpoint.load, version, route.transport))
    try:
        await group.call("send_weights", version, route)
    finally:
        await asyncio.gather(loading, return_exceptions=True)
    assert loading.result().probe_difference < 1e-5
    return {name: parameter.detach() for name, parameter in engine.model.named_parameters()}


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest norm of a parameter's difference, relative to the parameter's norm."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).norm() / first[name].norm()) for name in first)


async def train(run: RunHandle, group: "WorkerGroup | Alone", steps: range) -> list[UpdateReport]:
    """Train some steps, and save the checkpoint of version `SAVED`."""
    reports = []
    for step in steps:
        open_store(run).clear(step)
        every = await train_step(run, group, step)
        report, *others = every
        assert not any(others)  # rank 0 has the report of all ranks
        reports.append(report)
        if step + 1 == SAVED:
            await group.call("save", SAVED)
            await group.call("finish_saving")
    return reports


class Alone:
    """A single rank as a plain object: no process, no group."""

    def __init__(self, run: RunHandle) -> None:
        self.ranks = (PolicyWorker(run),)
        self.ranks[0].start()

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.ranks[0], method)(*args)]


@dataclass(frozen=True)
class Trained:
    """A run after all of its steps."""

    run: RunHandle
    reports: list[UpdateReport]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Trained:
    """A run of one rank."""
    return asyncio.run(_train_alone(runs.make("alone", 1, STEPS)))


async def _train_alone(run: RunHandle) -> Trained:
    one = Alone(run)
    version = one.ranks[0].handle().version
    reports = await train(run, one, range(version, STEPS))
    return Trained(run, reports, await weights(run, one, STEPS))


@pytest.fixture(scope="module")
def pair(runs: Runs) -> Trained:
    """A run of two ranks, whose workers are left running."""

    async def train_pair(run: RunHandle) -> Trained:
        two = await get_group(run, "policy")
        reports = await train(run, two, range(STEPS))
        return Trained(run, reports, await weights(run, two, STEPS))

    return asyncio.run(train_pair(runs.make("pair", 2, STEPS)))


async def trained_group(run: RunHandle) -> WorkerGroup:
    """Return a run's group after all steps; if an earlier test has killed it, it resumes from the checkpoint."""
    group = await get_group(run, "policy")
    version = (await group.call("handle"))[0].version
    await train(run, group, range(version, STEPS))
    return group


def pids(group: WorkerGroup) -> list[int]:
    return [ray.get(rank.__ray_call__.remote(lambda worker: os.getpid())) for rank in group.ranks]


def shorten_collectives(group: WorkerGroup) -> None:
    """Have the ranks wait for one another for a second instead of ten minutes."""
    for rank in group.ranks:
        ray.get(rank.__ray_call__.remote(lambda worker: _set_pg_timeout(timedelta(seconds=1))))


def test_two_ranks_train_as_one(alone: Trained, pair: Trained) -> None:
    assert distance(alone.weights, pair.weights) < 1e-6
    for mine, ours in zip(alone.reports, pair.reports, strict=True):
        assert mine.metrics.keys() == ours.metrics.keys()
        for name, metric in mine.metrics.items():
            assert ours.metrics[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-6), name


def test_a_dead_rank_ends_the_group_and_the_next_resumes_from_the_checkpoint(alone: Trained, pair: Trained) -> None:
    async def lose_and_resume() -> dict[str, torch.Tensor]:
        two = await trained_group(pair.run)
        os.kill(pids(two)[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await train(pair.run, two, range(STEPS, STEPS + 1))
        two = await get_group(pair.run, "policy")
        assert (await two.call("handle"))[0].version == SAVED
        await train(pair.run, two, range(SAVED, STEPS))
        return await weights(pair.run, two, STEPS)

    assert distance(alone.weights, asyncio.run(lose_and_resume())) < 1e-6


def test_a_non_finite_loss_on_one_rank_stops_both_before_either_steps(pair: Trained) -> None:
    async def poison() -> None:
        two = await trained_group(pair.run)
        batch = await scored(pair.run, two, STEPS)
        plan = plan_of(pair.run, batch)
        row = plan.updates[0].ranks[1][0].rows[0]
        with pytest.raises(NonFiniteError, match=rf"rows \[{row}\] of .*whose advantages are not .* columns are in"):
            await two.call("update", with_advantages(pair.run, batch, poisoned=row), plan, STEPS)

    asyncio.run(poison())
    (saved,) = (Path(pair.run.directory) / "non_finite").glob(f"step-{STEPS:06d}-rank-1.arrow")
    assert pa.ipc.open_file(saved).read_all().num_rows == 1


def test_a_cancelled_call_ends_the_group_unless_another_driver_has_taken_over(pair: Trained) -> None:
    async def cancel(group: WorkerGroup) -> None:
        called = asyncio.create_task(group.call("handle"))
        await asyncio.sleep(0)
        called.cancel()
        with pytest.raises(asyncio.CancelledError):
            await called

    async def cancel_both() -> None:
        two = await trained_group(pair.run)
        taken = {worker_name(pair.run.identity, "policy", rank): actor for rank, actor in enumerate(two.ranks)}
        running = pids(two)
        await cancel(WorkerGroup(taken, may_kill=lambda: False))
        assert pids(two) == running
        await cancel(two)
        assert find_group(pair.run, "policy") is None

    asyncio.run(cancel_both())


def test_what_one_rank_finds_damaged_no_rank_loads(runs: Runs) -> None:
    run = runs.make("damaged", 2, STEPS)

    async def save_and_start_again() -> int:
        two = await get_group(run, "policy")
        for step in range(2):
            await train_step(run, two, step)
            await two.call("save", step + 1)
        await two.call("finish_saving")
        two.kill()
        file = max((Path(run.directory) / "policy/step-000002").glob("rank-*"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        two = await get_group(run, "policy")
        return (await two.call("handle"))[0].version

    assert asyncio.run(save_and_start_again()) == 1


def test_a_checkpoint_that_only_one_rank_was_told_to_save_ends_the_group(runs: Runs) -> None:
    """As when the driver is killed meanwhile: that rank would wait, and take the next checkpoint for this one."""
    run = runs.make("half-told", 2, STEPS)

    async def save_half() -> int:
        two = await get_group(run, "policy")
        for step in range(2):
            await train_step(run, two, step)
            if not step:
                await two.call("save", 1)
                await two.call("finish_saving")
        before = pids(two)
        assert pids(await get_group(run, "policy")) == before
        await call(two.ranks[0], "save", 2)
        two = await get_group(run, "policy")
        assert not {*pids(two)} & {*before}
        assert (await two.call("handle"))[0].version == 1
        open_store(run).clear(1)
        await train_step(run, two, 1)
        await two.call("save", 2)
        await two.call("finish_saving")
        return await call(two.ranks[0], "retain", [])

    assert asyncio.run(save_half()) == 2


def test_one_rank_resumes_from_a_checkpoint_of_two(runs: Runs, alone: Trained, pair: Trained) -> None:
    resumed = runs.make("pair", 1, STEPS)
    assert Alone(resumed).ranks[0].handle().version == SAVED
    assert distance(alone.weights, asyncio.run(_train_alone(resumed)).weights) < 1e-6


@pytest.mark.extended
def test_two_ranks_resume_from_a_checkpoint_of_one_and_a_stopped_rank_is_lost(runs: Runs, alone: Trained) -> None:
    resumed = runs.make("alone", 2, STEPS)

    async def resume_and_stop() -> None:
        two = await get_group(resumed, "policy")
        assert (await two.call("handle"))[0].version == SAVED
        await train(resumed, two, range(SAVED, STEPS))
        assert distance(alone.weights, await weights(resumed, two, STEPS)) < 1e-6
        shorten_collectives(two)
        os.kill(pids(two)[1], signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match="lost the other ranks"):
            await weights(resumed, two, STEPS)

    asyncio.run(resume_and_stop())


def test_more_ranks_than_cores_are_rejected(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.num_policy_ranks = 64, but the cluster has 2 cores"):
        check_resources(runs.make("many", 64, STEPS).config)
