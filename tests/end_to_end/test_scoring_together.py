"""Behavior and reference scoring, one after the other or at the same time: the same columns and weights."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from infra.services.processes import process_tree
from infra.stores.offline import read_step
from infra.workers.placement import score_together
from tests.support.configs import run_config
from tests.support.run_results import Run
from tests.support.workplace import Command, Workplace

pytestmark = pytest.mark.extended

STEPS = 2
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "store.keep_steps=1", "kl.coef=0.01"),
    *("runtime.device=cpu", "optim.updates_per_step=2"),
    *("reward.path=tiny_rewards:switched", "reward.timeout_seconds=inf"),
)
TOGETHER = "reference scoring"  # the name of what ran in the background


@pytest.fixture(scope="module")
def one_node(ray_cluster: Cluster, workplace: Workplace) -> Run:
    """A run on a cluster of one node."""
    train_on(ray_cluster, workplace, "one-node").finish()
    return workplace.run("one-node")


@pytest.fixture(scope="module")
def second_node(ray_cluster: Cluster, one_node: Run) -> Iterator[Any]:
    """A second node, added after the run on one."""
    added = ray_cluster.add_node(num_cpus=2, object_store_memory=2**27)
    ray_cluster.wait_for_nodes()
    yield added
    ray_cluster.remove_node(added)


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: Cluster, workplace: Workplace, second_node: Any) -> Run:
    """The same run on a cluster of two nodes, whose reference is killed when the first step's rows can be scored."""
    run, hold = workplace.run("two-nodes"), workplace.folder / "hold"
    hold.touch()  # the first evaluation does not end, before which all workers have started
    driver = train_on(ray_cluster, workplace, run.run_id)
    driver.wait_for(lambda: bool(run.metrics.events()))
    (reference,) = [process for process in process_tree(os.getpid()) if title(process).startswith("ray::Reference")]
    reference.suspend()  # so that no step ends without it
    hold.unlink()
    driver.wait_for(lambda: run.committed(0, "put"))
    reference.kill()
    driver.finish()
    return run


def title(process: psutil.Process) -> str:
    """Return what the process calls itself; empty if it has ended."""
    try:
        return "".join(process.cmdline()[:1])
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def train_on(cluster: Cluster, workplace: Workplace, run_id: str) -> Command:
    """Start a run on the session's cluster, whose processes are children of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(workplace.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only, as the cluster
        patch.setitem(workplace.environment, "RAY_AUTH_MODE", "token")
        return workplace.start(*CONFIG, "--run-id", run_id, f"services.ray_address={cluster.address}")


def overlaps(run: Run) -> list[bool]:
    """Return for each step whether the reference scored in the background."""
    return [any(span.name == TOGETHER for span in report.timeline) for report in run.metrics.steps()]


def test_scoring_together_changes_no_result_even_if_the_reference_dies(one_node: Run, two_nodes: Run) -> None:
    assert overlaps(one_node) == [False] * STEPS
    assert overlaps(two_nodes) == [True] * STEPS
    assert two_nodes.weights(STEPS) == one_node.weights(STEPS)
    assert two_nodes.step_metrics() == one_node.step_metrics()
    last = [read_step(run.path) for run in (one_node, two_nodes)]
    assert {"behavior_logprobs", "reference_logprobs", "advantages"} <= set(last[0].column_names)
    assert last[0].equals(last[1])
    assert not [event for event in two_nodes.metrics.events() if event.kind == "restart"]  # only the stage was retried
    for report in two_nodes.metrics.steps():  # the phases still follow one another: none is counted twice
        assert sum(report.seconds_by_phase.values()) <= report.seconds
        assert {"logprob", "reference"} <= set(report.seconds_by_phase)


def test_they_score_together_on_devices_of_their_own(two_nodes: Run, second_node: Any, tmp_path: Path) -> None:
    assert score_together(run_config(tmp_path, kl={"coef": 0.1}))
    assert not score_together(run_config(tmp_path))  # no reference
    assert not score_together(run_config(tmp_path, kl={"coef": 0.1, "in_reward": True}))
    with_lora = {"path": "model", "lora": {"rank": 4}}
    assert not score_together(run_config(tmp_path, kl={"coef": 0.1}, model=with_lora))  # it is the policy itself
