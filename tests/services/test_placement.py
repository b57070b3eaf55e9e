"""Where workers compute, with fake GPUs on several raylets of one machine."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from flows.recovery import record_event
from flows.train import _wait_for_device
from infra.ray import health
from infra.ray.actors import call, create_actor, find_actor, kill_actors
from infra.ray.health import run_owner
from infra.storage.runs import RunDirectory
from infra.stores.shared.index import start_shared_store
from infra.stores.shared.node_files import Limits
from infra.workers import placement
from infra.workers.actor import PlacedActor, actor_class
from infra.workers.cluster_runs import cluster_runs, end_run
from infra.workers.layout import Role, worker_numbers
from infra.workers.nodes import check_nodes, leave_drained, wait_for_drain
from infra.workers.placement import check_resources, place, release
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ResourcesError
from schemas.step import PolicyHandle, RunHandle
from tests.support.configs import placed_config, run_config
from tests.support.nodes import drain_node
from tests.support.progress import wait_until

GPUS_PER_NODE = 4
PROBE = actor_class("tests.support.placed_worker:Probe", "where", "device", base=PlacedActor)


@pytest.fixture(scope="module")
def nodes(ray_cluster: Cluster) -> Iterator[list[Any]]:
    """Two nodes with four fake GPUs each, next to the head; the last tests remove one, and drain one."""
    added = [ray_cluster.add_node(num_cpus=1, num_gpus=GPUS_PER_NODE, object_store_memory=2**27) for _ in range(2)]
    ray_cluster.wait_for_nodes()
    yield added
    for node in ray_cluster.list_all_nodes():
        if node is not ray_cluster.head_node:
            ray_cluster.remove_node(node)
    wait_until(lambda: not ray.cluster_resources().get("GPU", 0))


def start(run_id: str, of: RunConfig) -> RunHandle:
    return RunHandle(run_id=run_id, identity=run_id, directory="", config=of, store_incarnation="g")


async def probe(run: RunHandle, role: Role, number: int) -> Any:
    [(slot, options)] = await place(run, role, [number])
    options = {**health.ACTOR_OPTIONS, **options}
    return create_actor(f"{run.run_id}/{role}-{number}", PROBE, slot, run, number, {}, options=options)


def probes(run: RunHandle) -> dict[tuple[Role, int], tuple[str, str, list[str]]]:
    """Start a probe in place of each of the run's workers; return their nodes, visible GPUs and Ray's GPUs."""

    async def start_all() -> list[Any]:
        actors = await asyncio.gather(*(probe(run, *worker) for worker in worker_numbers(run.config)))
        return [tuple(await call(actor, "where")) for actor in actors]

    return dict(zip(worker_numbers(run.config), asyncio.run(start_all()), strict=True))


async def start_first(runs: list[RunHandle]) -> None:
    """Start the first rank of each run."""
    actors = await asyncio.gather(*(probe(run, "policy", 0) for run in runs))
    await asyncio.gather(*(call(actor, "where") for actor in actors))


@contextmanager
def started(run_id: str, of: RunConfig) -> Iterator[RunHandle]:
    """A run, whose workers and GPUs are freed at the end."""
    run = start(run_id, of)
    try:
        yield run
    finally:
        end(run)


def miss_pings(name: str, seconds: float) -> Any:
    """Have an actor believe that its last ping came so much earlier; return the call, in which it may end."""

    def miss(actor: Any) -> None:
        actor._pinged -= seconds

    return find_actor(name).__ray_call__.remote(miss)


def end(run: RunHandle) -> None:
    kill_actors(f"{run.run_id}/{role}-{number}" for role, number in worker_numbers(run.config))
    release(run.run_id)


def test_every_worker_has_a_gpu_of_its_own_and_ranks_are_packed_in_order(tmp_path: Path, nodes: list[Any]) -> None:
    with started("separate", placed_config(tmp_path, ranks=5, rollout=2, reference=1, device="cuda")) as run:
        found = probes(run)
        order = [found["policy", rank][0] for rank in range(5)]
        assert order == sorted(order, key=order.index)
        assert [order.count(node) for node in dict.fromkeys(order)] == [4, 1]
        assert len({(node, *gpus) for node, _, gpus in found.values()}) == len(found) == 8
        assert all(visible == ",".join(gpus) and len(gpus) == 1 for _, visible, gpus in found.values())
        with pytest.raises(ConfigError, match=r"worker policy-0 is to .* with 1 GPUs, but torch .* sees 0 on node"):
            asyncio.run(call(find_actor("separate/policy-0"), "device"))
    wait_until(lambda: ray.available_resources().get("GPU", 0) == 8)


def test_an_engine_has_gpus_of_one_node_which_others_do_not_see(tmp_path: Path, nodes: list[Any]) -> None:
    with started("parallel", placed_config(tmp_path, ranks=3, rollout=2, tensor_parallel=2, device="cuda")) as run:
        found = probes(run)
        for number in range(2):
            _, visible, gpus = found["rollout", number]
            assert visible == ",".join(gpus)
            assert len(gpus) == 2
        held = [(node, gpu) for node, _, gpus in found.values() for gpu in gpus]
        assert len(held) == len(set(held)) == 7
        assert len({found["policy", rank][0] for rank in range(3)}) == 1
        scattered = placed_config(tmp_path, tensor_parallel=4, device="cuda", timeouts={"resource_seconds": 0})
        line = r"an engine takes 4 of one node, but the nodes have 1 that are not reserved, where this fits: runtime\."
        with pytest.raises(ResourcesError, match=line):
            probes(start("scattered", scattered))
        with pytest.raises(
            ConfigError, match=r"the nodes have 4, 4, enough for 0; what fits: rollout\.tensor_parallel = 3"
        ):
            check_resources(placed_config(tmp_path, tensor_parallel=6, device="cuda"))
    wait_until(lambda: ray.available_resources().get("GPU", 0) == 8)


@pytest.mark.extended
def test_colocated_workers_share_gpus_by_number(tmp_path: Path, nodes: list[Any]) -> None:
    with started("colocated", placed_config(tmp_path, ranks=2, rollout=2, reference=2, placement="colocated")) as run:
        found = probes(run)
        for number in range(2):
            assert found["policy", number] == found["rollout", number] == found["reference", number]
        assert found["policy", 0] != found["policy", 1]
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 6)


def test_a_worker_on_the_cpu_sees_no_gpu(tmp_path: Path, nodes: list[Any]) -> None:
    with started("on-cpu", placed_config(tmp_path, device="cpu")) as run:
        assert {visible for _, visible, _ in probes(run).values()} == {""}  # though its node has GPUs
        assert asyncio.run(call(find_actor("on-cpu/policy-0"), "device")) == "cpu"


def test_gpus_that_others_hold_are_awaited_and_then_refused(
    tmp_path: Path, nodes: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_PATIENCE_SECONDS", 0)  # the first look already says what is awaited
    first = start("first", placed_config(tmp_path, ranks=6, device="cuda"))
    second = start("second", placed_config(tmp_path, ranks=2, device="cuda", timeouts={"resource_seconds": 5}))
    try:
        asyncio.run(place(first, "policy", [0]))  # reserves all that the run needs
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 1)
        line = r"the Ray cluster has 8 GPUs, 1 free, run first holds 7"
        with pytest.raises(ResourcesError, match=rf"no GPU for run second within .* = 5: {line}.*sluice stop RUN"):
            probes(second)
        assert f"run second waits for 3 GPUs: {line}" in caplog.text
        assert not placement._find_group("second")  # nothing stays reserved
        patient = start("second", placed_config(tmp_path, ranks=2, device="cuda", timeouts={"resource_seconds": 600}))

        async def free_meanwhile() -> None:
            waiting = asyncio.ensure_future(place(patient, "policy", [0]))
            await asyncio.sleep(1)
            assert not waiting.done()
            await asyncio.to_thread(end, first)
            await waiting

        asyncio.run(free_meanwhile())
    finally:
        end(first)
        end(second)


@pytest.mark.extended
def test_workers_without_a_driver_end_and_free_their_gpus(tmp_path: Path, nodes: list[Any]) -> None:
    run = start("orphan", placed_config(tmp_path, device="cuda", timeouts={"driver_seconds": 600}))
    driven = start("driven", placed_config(tmp_path, device="cuda", timeouts={"driver_seconds": 600}))
    try:
        probes(run)
        asyncio.run(start_first([driven]))
        ray.get(miss_pings("driven/policy-0", 300))
        with health.monitored_actors(["driven/policy-0"], timeout_seconds=60):
            miss_pings("orphan/policy-0", 600)
            wait_until(lambda: find_actor("orphan/policy-0") is find_actor("orphan/rollout-0") is None)
            wait_until(lambda: ray.get(find_actor("driven/policy-0").describe.remote()).driverless_seconds < 300)
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 6)
    finally:
        end(run)
        end(driven)


def held_by_runs() -> set[tuple[str, int, int, str]]:
    """Return each run of the cluster with its numbers of processes and GPUs, and its owner."""
    return {(run.run_id, run.num_processes, run.num_gpus, run.owner) for run in cluster_runs()}


@pytest.mark.extended
def test_nothing_is_left_of_starts_and_kills(tmp_path: Path, nodes: list[Any]) -> None:
    of = placed_config(tmp_path, rollout=3, device="cuda")
    limits = Limits(2**20, 1, str(tmp_path), owner=run_owner(), driver_seconds=600)
    for at in range(2):  # 4 workers and as many stores
        runs = [start(f"run-{at}-{number}", of) for number in range(2)]  # which reserve all GPUs
        for run in runs:
            start_shared_store(run.run_id, limits)
        asyncio.run(start_first(runs))
        expected = {(run.run_id, 2, 1, run_owner()) for run in runs}
        wait_until(lambda expected=expected: held_by_runs() == expected)  # a process that is busy answers late
        refused = of.replace(timeouts=of.timeouts.replace(resource_seconds=0))
        with pytest.raises(ResourcesError):
            asyncio.run(place(start(f"refused-{at}", refused), "policy", [0]))
        assert [end_run(run.run_id) for run in runs] == [2] * 2
        wait_until(lambda: ray.available_resources().get("GPU", 0) == 8)
    assert cluster_runs() == []
    assert [table for table in placement_group_table().values() if table["state"] != "REMOVED"] == []
    assert [path.name for path in next(tmp_path.glob("sluice-*")).iterdir()] == ["lock"]


@pytest.mark.extended
def test_a_lost_nodes_workers_wait_for_free_gpus_and_move(
    tmp_path: Path, nodes: list[Any], ray_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with started(
        "moving", placed_config(tmp_path, ranks=2, rollout=3, device="cuda", timeouts={"resource_seconds": 600})
    ) as run:
        found = probes(run)
        lost = found["rollout", 2][0]
        assert lost != found["policy", 0][0]
        ray_cluster.remove_node(next(node for node in nodes if node.node_id == lost), allow_graceful=False)
        wait_until(lambda: find_actor("moving/rollout-2") is None and lost not in placement.living_nodes())
        impatient = run.config.timeouts.replace(resource_seconds=0)
        with pytest.raises(
            ResourcesError, match=r"needs 5 GPUs.*cluster has 4.*none came in timeouts\.resource_seconds = 0"
        ):
            asyncio.run(place(run.replace(config=run.config.replace(timeouts=impatient)), "rollout", [2]))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: asyncio.run(place(run, "rollout", [2])))
            wait_until(lambda: "run moving waits for nodes: " in caplog.text)
            assert not waiting.done()
            ray_cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=2**27)
            waiting.result()
        again = probes(run)
        assert again["rollout", 2][0] not in (lost, found["policy", 0][0])
        assert {worker: again[worker] for worker in found if worker != ("rollout", 2)} == {
            worker: where for worker, where in found.items() if worker != ("rollout", 2)
        }


def test_a_run_that_began_on_gpus_waits_for_them_when_it_is_resumed(
    tmp_path: Path, nodes: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, timeouts={"resource_seconds": 600}, services={"ray_address": "a.cluster:6379"})
    joined = placement._living()
    without = [node for node in joined if not node["Resources"].get("GPU")]
    present = [without]
    monkeypatch.setattr(placement, "_living", lambda: present[-1])
    directory = RunDirectory.create(config, "resumed")
    assert asyncio.run(_wait_for_device(directory, config)) == "cpu"  # it has not started before
    record_event(directory, PolicyHandle(run_id="resumed", version=0, incarnation="new"), "cuda")
    impatient = config.replace(timeouts=config.timeouts.replace(resource_seconds=0))
    with pytest.raises(ResourcesError, match=r"runtime\.device = 'cuda' needs \d+ GPUs .* cluster has 0.*none came in"):
        asyncio.run(_wait_for_device(directory, impatient))
    larger = config.replace(rollout=config.rollout.replace(num_workers=16))
    with pytest.raises(ConfigError, match=r"needs 17 GPUs .* cluster has 0"):  # at once: it never had as many
        asyncio.run(_wait_for_device(directory, larger))
    alone = config.replace(services=config.services.replace(ray_address=None))
    with pytest.raises(ConfigError, match=r"runtime\.device = 'cuda' needs \d+ GPUs .* cluster has 0"):
        asyncio.run(_wait_for_device(directory, alone))
    on_cpu = config.replace(runtime=config.runtime.replace(device="cpu"))
    assert asyncio.run(_wait_for_device(directory, on_cpu)) == "cpu"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: asyncio.run(_wait_for_device(directory, config)))
        wait_until(lambda: "run resumed waits for nodes: " in caplog.text)
        assert not waiting.done()
        present.append(joined)
        assert waiting.result() == "cuda"


def test_a_drained_node_is_noticed_and_left(tmp_path: Path, nodes: list[Any], ray_cluster: Cluster) -> None:
    ray_cluster.add_node(num_cpus=1, num_gpus=GPUS_PER_NODE, object_store_memory=2**27)
    ray_cluster.wait_for_nodes()
    with started("drained", placed_config(tmp_path, device="cuda", timeouts={"resource_seconds": 600})) as run:
        drained = probes(run)["policy", 0][0]
        own = ray.get_runtime_context().get_node_id()
        leave_drained()
        assert drained in placement.living_nodes()
        drain_node(ray_cluster.address, drained)
        assert asyncio.run(wait_for_drain(lambda: {drained, own, "gone"})) == {drained}
        assert drained in placement.living_nodes()  # with its workers, until its deadline
        assert asyncio.run(call(find_actor("drained/policy-0"), "where"))[0] == drained
        leave_drained()  # as a run does before it starts workers again
        assert drained not in placement.living_nodes()
        placement._left.clear()
        check_nodes(RunDirectory(str(tmp_path)), run.config)  # as a run does that is started then
        assert drained not in placement.living_nodes()
        end(run)
        assert drained not in {where[0] for where in probes(run).values()}
