"""Scoring by policy, reference and teacher, one after the other or at the same time: the same columns and weights."""

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
from tests.support.tiny import make_tiny_model
from tests.support.workplace import Command, Workplace

pytestmark = pytest.mark.extended

STEPS = 2
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "store.keep_steps=1", "kl.coef=0.01"),
    *("runtime.device=cpu", "optim.updates_per_step=2"),
    *("distillation.teachers.big={path='scoring-teacher'}", "distillation.reward_weight=0.5"),
    *("reward.path=tiny_rewards:switched", "reward.timeout_seconds=inf"),
)
TOGETHER = {"reference scoring", "teacher scoring"}  # the names of what ran in the background


@pytest.fixture(scope="module")
def one_node(ray_cluster: Cluster, workplace: Workplace) -> Run:
    """A run on a cluster of one node."""
    make_tiny_model(workplace.folder / "scoring-teacher", seed=7)
    train_on(ray_cluster, workplace, "one-node").finish()
    return workplace.run("one-node")


@pytest.fixture(scope="module")
def more_nodes(ray_cluster: Cluster, one_node: Run) -> Iterator[Any]:
    """Two more nodes, added after the run on one: one for the reference, one for the teacher."""
    added = [ray_cluster.add_node(num_cpus=2, object_store_memory=2**27) for _ in range(2)]
    ray_cluster.wait_for_nodes()
    yield added
    for node in added:
        ray_cluster.remove_node(node)


@pytest.fixture(scope="module")
def three_nodes(ray_cluster: Cluster, workplace: Workplace, more_nodes: Any) -> Run:
    """The same run on a cluster of three nodes, whose reference is killed when the first step's rows can be scored."""
    run, hold = workplace.run("three-nodes"), workplace.folder / "hold"
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


def in_background(run: Run) -> list[set[str]]:
    """Return for each step what scored in the background."""
    return [TOGETHER & {span.name for span in report.timeline} for report in run.metrics.steps()]


def test_scoring_together_changes_no_result_even_if_the_reference_dies(one_node: Run, three_nodes: Run) -> None:
    assert in_background(one_node) == [set()] * STEPS
    assert in_background(three_nodes) == [TOGETHER] * STEPS
    assert three_nodes.weights(STEPS) == one_node.weights(STEPS)
    assert three_nodes.step_metrics() == one_node.step_metrics()
    last = [read_step(run.path) for run in (one_node, three_nodes)]
    assert {"behavior_logprobs", "reference_logprobs", "teacher_logprobs", "advantages"} <= set(last[0].column_names)
    assert last[0].equals(last[1])
    assert "restart" not in {event.kind for event in three_nodes.metrics.events()}  # only the stage was retried
    for report in three_nodes.metrics.steps():  # the phases still follow one another: none is counted twice
        assert sum(report.seconds_by_phase.values()) <= report.seconds
        assert {"logprob", "reference", "teacher"} <= set(report.seconds_by_phase)


def test_they_score_together_on_devices_of_their_own(three_nodes: Run, more_nodes: Any, tmp_path: Path) -> None:
    assert score_together(run_config(tmp_path, kl={"coef": 0.1}))
    assert not score_together(run_config(tmp_path))  # no reference and no teacher
    teachers = {"one": {"path": "one", "data_sources": ["sums"]}, "two": {"path": "two"}}
    assert score_together(run_config(tmp_path, distillation={"teachers": teachers}))
    assert not score_together(run_config(tmp_path, kl={"coef": 0.1}, distillation={"teachers": teachers}))  # a 4th node
    assert not score_together(run_config(tmp_path, kl={"coef": 0.1, "in_reward": True}))
    with_lora = {"path": "model", "lora": {"rank": 4}}
    assert not score_together(run_config(tmp_path, kl={"coef": 0.1}, model=with_lora))  # it is the policy itself
