"""The driver's calls of a publish, and the weight group that it keeps for the next one."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.ray.actors import kill_actors
from infra.ray.ranks import WorkerGroup
from infra.storage.runs import RunDirectory
from infra.weights import sync
from infra.workers.generate import sync_workers
from infra.workers.launch import get_group, kill_workers, rollout_pool, worker_name
from rl_core.views import with_groups
from schemas.step import RunHandle
from tasks.logprob import score_behavior
from tests.support.configs import run_config
from tests.support.policy_runs import plan_of, put_rows, with_advantages
from tests.support.tiny import make_tiny_data, make_tiny_model

NUM_WORKERS = 2
NOTHING = {"weight_group_member": NUM_WORKERS}
STEADY = {"weight_group_member": NUM_WORKERS, "send_weights": 1, "load_weights": NUM_WORKERS}
FORMING = {  # a group with that many rollout workers
    num: {
        "incarnation": 1,
        "open_weight_rendezvous": 1,
        "init_weight_group": num + 1,
        "send_weights": 1,
        "weight_group_member": NUM_WORKERS + 1,
        "load_weights": num,
    }
    for num in (1, NUM_WORKERS)
}


@pytest.fixture
def run(tmp_path: Path, ray_cluster: None) -> Iterator[RunHandle]:
    make_tiny_model(tmp_path / "model")
    make_tiny_data(tmp_path / "train.parquet", 8)
    config = run_config(
        tmp_path,
        rollout={"max_response_tokens": 9, "num_workers": NUM_WORKERS},
        optim={"lr": 1e-2, "updates_per_step": 2},
        packing={"token_budget": 24},
        store={"kind": "fsspec"},
    )
    directory = RunDirectory.create(config, "publish")
    yield RunHandle(
        run_id="publish", identity="publish", directory=str(directory.path), config=config, store_incarnation="g"
    )
    kill_workers("publish", config)


async def update(run: RunHandle, step: int) -> None:
    """Train one step on made-up rows."""
    group = await get_group(run, "policy")
    batch, policy = put_rows(run, step), (await group.call("handle"))[0]
    scored = with_groups(batch, [(await score_behavior.fn(run, policy, batch)).group])
    await group.call("update", with_advantages(run, scored), plan_of(run, batch), step)


def test_the_second_publish_asks_the_workers_once_and_then_sends(
    run: RunHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    call, call_ranks = sync.call, WorkerGroup.call

    async def spy(actor: Any, method: str, *args: Any) -> Any:
        calls.append(method)
        return await call(actor, method, *args)

    async def spy_on_ranks(group: WorkerGroup, method: str, *args: Any) -> list[Any]:
        calls.append(method)
        return await call_ranks(group, method, *args)

    monkeypatch.setattr(sync, "call", spy)
    monkeypatch.setattr(WorkerGroup, "call", spy_on_ranks)

    async def publish(version: int) -> tuple[Counter[str], list[int | None]]:
        """Return the calls, without those that start workers, and the versions that the workers then hold."""
        workers = await rollout_pool(run).get_all()
        calls.clear()
        await sync_workers(run, version)
        made = Counter(method for method in calls if method not in ("prepare", "start", "open_rendezvous"))
        states = await asyncio.gather(*(call(worker, "weight_group_member") for worker in workers))
        return made, [state.version for state in states]

    async def check() -> None:
        await get_group(run, "policy")
        assert await publish(0) == (NOTHING, [0, 0])  # they start with it
        await update(run, 0)
        assert await publish(1) == (FORMING[2], [1, 1])
        await update(run, 1)
        assert await publish(2) == (STEADY, [2, 2])
        assert await publish(2) == (NOTHING, [2, 2])
        kill_actors([worker_name("publish", "rollout", 1)])
        assert await publish(2) == (FORMING[1], [2, 2])
        await update(run, 2)
        assert await publish(3) == (FORMING[2], [3, 3])
        kill_actors([worker_name("publish", "policy", 0)])
        assert await publish(0) == (FORMING[2], [0, 0])  # by another policy, from the start

    asyncio.run(check())
