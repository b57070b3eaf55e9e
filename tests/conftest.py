"""Fixtures that several test folders share."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from infra.variables import LOCAL_RAY_VARIABLES, set_variables
from tests.support.ended import require_ended
from tests.support.progress import DeadlockDetector

# A slow example is no failure.
# No test depends on speed or chance; `pytest --hypothesis-profile=explore` looks for other examples each time.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("explore"), derandomize=True)
settings.load_profile("fixed")

LOOPBACK = "127.0.0.1"
# Files that share a workplace: one process runs their tests, so that its services are started once.
OF_THE_WORKPLACE = tuple(
    f"tests/{name}.py"
    for name in (
        "end_to_end/test_kill",
        "end_to_end/test_train",
        "end_to_end/test_python_api",
        "services/test_services",
        "services/test_stages",
    )
)
SLOW_FOLDERS = ("end_to_end", "services")  # whose tests start services

# Read when Typer is imported: a terminal's or CI's settings would change what the command prints.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH", "COLUMNS"):
    os.environ.pop(name, None)
set_variables(LOCAL_RAY_VARIABLES)  # as of a run's own Ray, for the clusters of tests; before anything imports Ray
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray gives an actor


@pytest.fixture(autouse=True, scope="module")
def threads_restored() -> Iterator[None]:
    """Give torch its number of threads back after a module's tests, as results' rounding depends on it."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_configure(config: pytest.Config) -> None:
    """Have Ray make the user's token once, as `sluice` does, before processes side by side would each make one."""
    from infra.services.local import RAY_COMMAND

    if not hasattr(config, "workerinput"):
        subprocess.run([*RAY_COMMAND, "get-auth-token", "--generate"], capture_output=True, check=True)


class _FilesScheduling(LoadFileScheduling):
    """Gives each process one file at a time, and all of `OF_THE_WORKPLACE` to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "workplace" if file in OF_THE_WORKPLACE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _FilesScheduling:
    return _FilesScheduling(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: a run that is ended before its summary would not tell of it."""
    if report.failed:
        print(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}", file=sys.__stdout__, flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts services as slow, and begin with it, so that no file of minutes is left over at the end."""
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS:
            item.add_marker("slow")
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fail a test that hangs; nothing fails for being slow."""
    with DeadlockDetector():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that is marked with a command which wasn't run."""
    yield
    require_ended(item)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of one node with two CPUs, for the whole session, that no other machine can reach."""
    import ray
    from ray.cluster_utils import Cluster

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    head = {"num_cpus": 2, "object_store_memory": 256 * 2**20, "node_ip_address": LOOPBACK}
    head |= dict.fromkeys(("include_dashboard", "include_log_monitor"), False)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, namespace="sluice", log_to_driver=False, _node_ip_address=LOOPBACK)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert ray.util.get_node_ip_address() == LOOPBACK
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A folder in which `sluice` commands run; its services are stopped at the session's end."""
    from tests.support.workplace import Workplace

    place = Workplace(tmp_path_factory.mktemp("workplace"))
    place.choose_port()
    yield place
    place.close()


@pytest.fixture(scope="session")
def small_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system in memory of 8 MiB; without the right to mount one, the test is skipped."""
    folder = tmp_path_factory.mktemp("memory")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
