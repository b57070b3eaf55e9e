"""A run on several nodes: whatever node is lost, the others go on, and the run ends in the same weights."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.support.nodes import drain_node
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

LOOPBACK = "127.0.0.1"
STEPS = 5
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "rollout.batch_prompts=1"),
    *("runtime.num_threads=1", "checkpoint.every_steps=2", "kl.coef=0.01"),
    *("reward.path=tiny_rewards:switched", "reward.timeout_seconds=inf"),
)
WORKERS = "rollout.num_workers=2"  # which changes no result


def start_cluster(*cores: int) -> Cluster:
    """Start a head without cores, and nodes with so many each."""
    head = {"num_cpus": 0, "object_store_memory": 2**27, "node_ip_address": LOOPBACK}
    head |= dict.fromkeys(("include_dashboard", "include_log_monitor"), False)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for num_cpus in cores:
        cluster.add_node(num_cpus=num_cpus, object_store_memory=2**27, node_ip_address=LOOPBACK)
    return cluster


@pytest.fixture
def clusters() -> Iterator[list[Cluster]]:
    """The clusters that a test has started; they are shut down at its end."""
    started: list[Cluster] = []
    yield started
    for cluster in started:
        cluster.shutdown()


def place_of(worker: str, printed: str) -> str:
    """Return the first digits of the id of the node where a worker was started last."""
    return re.findall(rf"^ +{worker} +{LOOPBACK} \((\w+)\)", printed, re.M)[-1]


def kill_node(cluster: Cluster, place: str) -> None:
    (node,) = [node for node in cluster.list_all_nodes() if node.node_id.startswith(place)]
    cluster.remove_node(node, allow_graceful=False)


def test_a_drained_node_is_left_with_a_checkpoint(
    workplace: Workplace, clusters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(workplace.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as here: loopback only
    run, settings = workplace.run("drained"), ("checkpoint.every_steps=100", "timeouts.notice_seconds=600")
    clusters.append(start_cluster(1, 1, 1))
    address = f"services.ray_address={clusters[0].address}"
    driver = workplace.start(*CONFIG, *settings, address, "--run-id", "drained")
    driver.wait_standing(lambda: run.passed(1, "update"))
    (hold := workplace.folder / "hold").touch()  # no further rollout ends
    driver.resume()
    driver.wait_for(lambda: run.num_done >= 2)
    place = place_of("policy-0", driver.printed)
    (node,) = [each.node_id for each in clusters[0].list_all_nodes() if each.node_id.startswith(place)]
    drain_node(clusters[0].address, node)
    driver.wait_for(lambda: "the run goes on without it" in driver.printed.partition(" s ago: ")[2])
    done = run.num_done
    hold.unlink()
    printed = driver.finish()
    line = (
        rf"node {LOOPBACK} \({place}\) is drained, [\d.]+ s ago: the checkpoint after step {done} is complete; the run"
    )
    assert re.search(line, printed)
    assert place_of("policy-0", printed) != place
    for step in range(STEPS):  # none was done twice
        assert printed.count(f"step {step + 1:3}/{STEPS}") == 1
    workplace.sluice(*CONFIG, "--run-id", "undrained")
    assert run.weights(STEPS) == workplace.run("undrained").weights(STEPS)


def test_nodes_die_one_after_another(
    workplace: Workplace, clusters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(workplace.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as here: loopback only
    workplace.sluice(*CONFIG, "--run-id", "no-lost-nodes")
    clusters.append(start_cluster(1, 1, 1))
    address = f"services.ray_address={clusters[0].address}"
    driver = workplace.start(*CONFIG, WORKERS, address, "--run-id", "lost-nodes")
    run = workplace.run("lost-nodes")
    driver.wait_for(lambda: run.passed(0, "rollout"))
    places = {worker: place_of(worker, driver.printed) for worker in ("policy-0", "reference-0", "rollout-0")}
    assert len(set(places.values())) == 3
    kill_node(clusters[0], places["rollout-0"])  # the other rollout worker does its prompts, too
    driver.wait_for(lambda: run.passed(1, "update"))  # if columns went before they were durable, step 0 is run again
    kill_node(clusters[0], places["policy-0"])
    # From the newest checkpoint, on the only node that has cores left.
    driver.wait_standing(lambda: run.passed(2, "update"))
    (hold := workplace.folder / "hold").touch()  # no further rollout ends
    driver.resume()
    clusters[0].shutdown()
    printed = driver.finish(1)
    hold.unlink()
    assert "sluice resume lost-nodes" in printed
    clusters.append(start_cluster(1))
    workplace.sluice("resume", "lost-nodes", f"services.ray_address={clusters[1].address}")
    assert run.weights(STEPS) == workplace.run("no-lost-nodes").weights(STEPS)
