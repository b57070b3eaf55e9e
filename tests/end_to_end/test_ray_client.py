"""Runs whose driver is outside the Ray cluster, connected by Ray Client."""

from collections.abc import Iterator
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from infra.services.local import LOOPBACK, free_port
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS = 4
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "rollout.num_workers=2", "rollout.batch_prompts=1"),
    *("runtime.num_threads=1", "checkpoint.every_steps=2"),
)


@pytest.fixture(scope="module")
def cluster(workplace: Workplace) -> Iterator[tuple[Any, str]]:
    """A head without cores that takes Ray Clients, and a node with two cores; and the address for clients."""
    port = free_port()
    head = {"num_cpus": 0, "object_store_memory": 2**27, "node_ip_address": LOOPBACK}
    head |= dict.fromkeys(("include_dashboard", "include_log_monitor"), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # else Ray sometimes fails to start a client's process
        patch.chdir(workplace.folder)  # whose modules must not shadow Sluice's in Ray's processes either
        started = Cluster(initialize_head=True, head_node_args=head | {"ray_client_server_port": port})
        started.add_node(num_cpus=2, object_store_memory=2**27, node_ip_address=LOOPBACK)
    yield started, f"ray://{LOOPBACK}:{port}"
    started.shutdown()


def test_a_driver_outside_the_cluster_trains_the_same_weights_and_is_resumed(
    workplace: Workplace, cluster: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(workplace.environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as here: loopback only
    inside, client = cluster
    workplace.sluice(*CONFIG, "--run-id", "inside", f"services.ray_address={inside.address}")
    driver = workplace.start(*CONFIG, "--run-id", "outside", f"services.ray_address={client}")
    run = workplace.run("outside")
    driver.wait_for(lambda: run.passed(1, "advantage"))
    driver.kill()
    assert "outside" in workplace.sluice("ps", "--address", client)
    workplace.sluice("resume", "outside")
    assert run.weights(STEPS) == workplace.run("inside").weights(STEPS)
    assert workplace.sluice("ps", "--address", client) == "no run has processes in the cluster\n"


def test_a_failed_connection_is_one_line(workplace: Workplace, cluster: tuple[Any, str]) -> None:
    _, client = cluster
    closed = f"ray://{LOOPBACK}:{free_port()}"
    printed = workplace.sluice("train", "tiny.toml", f"services.ray_address={closed}", exit_code=2)
    assert f"error: no Ray Client server responds at '{closed}'" in printed
    other = "import sys, infra, ray; ray.__version__ = '2.59.0'; from flows.cli.main import main; main()"
    printed = workplace.python("-P", "-c", other, "ps", "--address", client, exit_code=2)
    (line,) = printed.splitlines()
    assert line.startswith(f"error: can't connect to {client}: Version mismatch: The cluster was started with: Ray: ")
    assert "This process on Ray Client was started with: Ray: 2.59.0" in line
