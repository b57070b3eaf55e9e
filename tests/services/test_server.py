"""A Prefect server that dies under a run: a local one is started again, another is waited for, and nothing hangs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.progress import Progress, wait_until
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

# A flow of 3 subflows; the second waits for a file. It uses the server as a configured one.
FLOWS = """
import asyncio, sys
from functools import partial
from pathlib import Path
from prefect import flow, get_run_logger, task
from prefect.events import emit_event
from rich.console import Console
from flows.lifecycle.exit import exit_process
from flows.lifecycle.session import prefect_session, run_flow
from flows.lifecycle.outages import call_through_outages
from schemas.config.runtime import ServicesConfig
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

services, code = ServicesConfig(prefect_api_url=url, ray_address="none"), 0
try:
    with prefect_session(services, Console()):
        print(run_flow(parent, services.replace(prefect_patience_seconds=patience)), calls, flush=True)
except ServerLostError as error:
    print(f"stopped: {error}", flush=True)
    code = 1
exit_process(code)
"""


class Flows:
    """A process that runs the flows, and is to lose its server in the second subflow."""

    def __init__(self, folder: Path, api_url: str, patience_seconds: float) -> None:
        self.folder, self.output = folder, folder / "output"
        with self.output.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, "-c", FLOWS, api_url, str(patience_seconds)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PREFECT_CLIENT_MAX_RETRIES": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, reached: Callable[[], bool]) -> None:
        wait_until(lambda: self.process.poll() is not None or reached(), Progress(lambda: [self.process]))

    def finish(self) -> tuple[int, str]:
        self.wait_for(lambda: False)
        return self.process.wait(), self.output.read_text()


@pytest.fixture(scope="module")
def ended(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit codes and outputs of two processes that lose the same server: one waits for it, the other does not."""
    server = workplace.services
    server.start(prefect=True, ray=False)
    url = str(server.prefect_api_url)
    patient, impatient = (Flows(tmp_path_factory.mktemp("flows"), url, seconds) for seconds in (1e6, 0))
    for flows in (patient, impatient):
        flows.wait_for((flows.folder / "reached").exists)
    workplace.kill_service("prefect")
    wait_until(lambda: server.state("prefect") is None)
    for flows in (patient, impatient):
        (flows.folder / "go").touch()
    stopped = impatient.finish()
    patient.wait_for(lambda: "(services.prefect_patience_seconds)" in patient.output.read_text())
    assert server.restart_prefect()
    return {"patient": patient.finish(), "impatient": stopped}


def test_a_server_is_waited_for_and_only_the_call_in_flight_is_repeated(ended: dict[str, tuple[int, str]]) -> None:
    code, printed = ended["patient"]
    assert (code, "Traceback" in printed) == (0, False), printed
    assert "done [0, 1, 1, 2]" in printed


def test_a_server_that_never_comes_back_stops_the_run_and_its_process(
    workplace: Workplace, ended: dict[str, tuple[int, str]]
) -> None:
    code, printed = ended["impatient"]
    assert code == 1, printed
    assert f"stopped: the Prefect server at {workplace.services.prefect_api_url} has not responded for 0 s" in printed
    assert "Traceback" not in printed
