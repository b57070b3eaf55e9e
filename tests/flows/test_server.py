"""A Prefect server that dies under a run: a local one is started again, another is waited for, and nothing hangs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.services.local import LocalServices
from tests.progress import Progress, wait_until

pytestmark = pytest.mark.slow

# A flow of 3 subflows; the second waits for a file. It uses the server as a configured one.
FLOWS = """
import asyncio, sys
from functools import partial
from pathlib import Path
from prefect import flow, get_run_logger, task
from prefect.events import emit_event
from rich.console import Console
from flows.exit import exit_process
from flows.cli.session import prefect_session, run_flow
from flows.server import call_through_outages
from schemas.config.runtime import RuntimeConfig
from schemas.errors import ServerLostError

url, patience = sys.argv[1], float(sys.argv[2])
calls = []

@task
def work(number):
    emit_event("test.worked", {"prefect.resource.id": f"number.{number}"})
    get_run_logger().info("task %d", number)

@flow(name="child")
async def child(number):
    calls.append(number)
    for _ in range(9):
        work(number)
    if number == 1 and calls.count(1) == 1:
        Path("reached").touch()
        while not Path("go").exists():
            await asyncio.sleep(0.05)

@flow(name="parent")
async def parent():
    for number in range(3):
        await call_through_outages(partial(child, number), patience)
    return "done"

runtime, code = RuntimeConfig(prefect_api_url=url, ray_address="none"), 0
try:
    with prefect_session(runtime, Console()):
        print(run_flow(parent, runtime.replace(prefect_patience_seconds=patience)), calls, flush=True)
except ServerLostError as error:
    print(f"stopped: {error}", flush=True)
    code = 1
exit_process(code)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    services = LocalServices(tmp_path_factory.mktemp("server"))
    services.start(prefect=True, ray=False)
    yield services
    services.stop()


class Flows:
    """A process that runs the flows, and loses its server in the second subflow."""

    def __init__(self, folder: Path, server: LocalServices, patience_seconds: float) -> None:
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, "-c", FLOWS, str(server.prefect_api_url), str(patience_seconds)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PREFECT_CLIENT_MAX_RETRIES": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.wait_for((folder / "reached").exists)
        state = server.state("prefect")
        assert state is not None
        psutil.Process(state.pid).kill()
        wait_until(lambda: server.state("prefect") is None)
        (folder / "go").touch()

    def wait_for(self, reached: object) -> None:
        wait_until(lambda: self.process.poll() is not None or reached(), Progress(lambda: [self.process]))  # type: ignore[operator]

    def finish(self) -> tuple[int, str]:
        self.wait_for(lambda: False)
        return self.process.wait(), self.output.read_text()


def test_a_server_is_waited_for_and_only_the_call_in_flight_is_repeated(server: LocalServices, tmp_path: Path) -> None:
    flows = Flows(tmp_path, server, patience_seconds=1e6)
    flows.wait_for(lambda: "waiting at most" in flows.output.read_text())
    assert server.restart_prefect()
    code, printed = flows.finish()
    assert (code, "Traceback" in printed) == (0, False), printed
    assert "done [0, 1, 1, 2]" in printed


def test_a_server_that_never_comes_back_stops_the_run_and_its_process(server: LocalServices, tmp_path: Path) -> None:
    url = server.prefect_api_url
    code, printed = Flows(tmp_path, server, patience_seconds=0).finish()
    assert code == 1, printed
    assert f"stopped: the Prefect server at {url} has not responded for 0 s" in printed
    assert "Traceback" not in printed
