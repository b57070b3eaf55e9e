"""Deployments on a workplace's Prefect server, asked and steered as the Prefect UI does it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import UUID

import psutil
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleUpdate, DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.filters import EventFilter, EventNameFilter, EventRelatedFilter

from tests.support.run_results import Run
from tests.support.workplace import Command, Workplace

POLL_SECONDS = 1.0  # between two questions to the server
MAX_STEPS = 3000  # of the runs while something is waited for: it was missed, and they would go on for hours


class Deployed:
    """The workplace's deployments, and the worker that runs their flow runs."""

    def __init__(self, place: Workplace, worker: Command, notified: list[str]) -> None:
        self.place, self.worker, self.notified = place, worker, notified
        self.hold = place.folder / "hold"  # while it exists, a reward is computed

    def start(self, deployment: str, **parameters: object) -> UUID:
        async def start(client: PrefectClient) -> UUID:
            found = await client.read_deployment_by_name(deployment)
            return (await client.create_flow_run_from_deployment(found.id, parameters=parameters)).id

        return self.place.ask(start)

    def flow_run(self, flow_run: UUID) -> FlowRun:
        return self.place.ask(lambda client: client.read_flow_run(flow_run))

    def flow_runs(self, deployment: str) -> list[FlowRun]:
        chosen = DeploymentFilter(name=DeploymentFilterName(any_=[deployment]))
        return self.place.ask(lambda client: client.read_flow_runs(deployment_filter=chosen))

    def run_of(self, flow_run: UUID) -> Run:
        return self.place.run(f"tiny-{str(flow_run)[-12:]}")

    def processes(self, flow_run: UUID) -> list[psutil.Process]:
        """The driver of a flow run and the workers that it has started."""
        drivers = [process for process in self.worker.processes if _is_driver(process, flow_run)]
        return [*drivers, *self.place.model_workers()]

    def schedule(self, cron: str, **parameters: object) -> None:
        """Give the deployment another schedule, whose flow runs have these parameters."""

        async def update(client: PrefectClient) -> None:
            deployment = await client.read_deployment_by_name("train/tiny")
            schedule = DeploymentScheduleUpdate(active=True, schedule=CronSchedule(cron=cron))
            changed = DeploymentUpdate(parameters={**deployment.parameters, **parameters}, schedules=[schedule])
            await client.update_deployment(deployment.id, changed)

        self.place.ask(update)

    def pause(self) -> None:
        async def pause(client: PrefectClient) -> None:
            await client.pause_deployment((await client.read_deployment_by_name("train/tiny")).id)

        self.place.ask(pause)

    def num_events(self, flow_run: UUID, what: str) -> int:
        """How often the worker has "submitted" a flow run to a process, or has "executed" it: the process is gone."""
        related = EventRelatedFilter(id=[f"prefect.flow-run.{flow_run}"])
        wanted = EventFilter(event=EventNameFilter(name=[f"prefect.worker.{what}-flow-run"]), related=related)
        return self.place.ask(lambda client: client.read_events(wanted, limit=1)).total

    def has_logged(self, flow_run: UUID, text: str) -> bool:
        chosen = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
        return any(text in log.message for log in self.place.ask(lambda client: client.read_logs(chosen)))

    def wait_for_state(self, flow_run: UUID, *names: str) -> FlowRun:
        self.wait_for(lambda: self.flow_run(flow_run).state_name in names)
        return self.flow_run(flow_run)

    def wait_for_steps(self, flow_run: UUID, done: int) -> None:
        run = self.run_of(flow_run)
        self.wait_for(lambda: run.num_done >= done)

    def wait_for(self, reached: Callable[[], bool]) -> None:
        steps = self._num_steps()

        def reached_after_a_while() -> bool:
            time.sleep(POLL_SECONDS)
            assert self._num_steps() - steps <= MAX_STEPS, "the runs went on without it"
            return reached()

        self.worker.wait_for(reached_after_a_while)

    def stop(self) -> None:
        """Kill the worker, and the runs that a test which failed has left: Prefect's may never end after a SIGTERM."""
        for process in self.worker.processes:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()
        self.worker.kill()

    def _num_steps(self) -> int:
        return sum(self.place.run(path.name).num_done for path in (self.place.folder / "runs").glob("*"))


def _is_driver(process: psutil.Process, flow_run: UUID | None = None) -> bool:
    """Return whether a process drives a flow run, or a given one."""
    try:
        is_driver = "flows.deployments.execute" in process.cmdline()
        own = process.environ().get("PREFECT__FLOW_RUN_ID")
        return is_driver and (flow_run is None or own == str(flow_run))
    except psutil.NoSuchProcess:  # it has ended, or is a zombie
        return False


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.received.append(self.rfile.read(int(self.headers["Content-Length"])).decode())  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving_notifications() -> Iterator[tuple[str, list[str]]]:
    """Receive notifications: yield the URL to send them to, and what was received."""
    server = HTTPServer(("127.0.0.1", 0), _Receiver)
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.received  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
