"""The local Prefect server and Ray head: addresses, and how they are found again."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
from prefect import flow, get_run_logger, task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.ui.reporter import delete_old_steps
from infra.services import local
from infra.services.local import LocalServices, prefect_responds
from infra.services.processes import process_tree
from tests.support.command import make_command
from tests.support.progress import wait_until
from tests.support.workplace import Workplace


@pytest.fixture(scope="module")
def services(workplace: Workplace) -> LocalServices:
    workplace.services.start(prefect=True, ray=True)
    return workplace.services


def test_every_port_is_on_loopback(services: LocalServices) -> None:
    listening = set()
    for name in ("prefect", "ray"):
        state = services.state(name)
        assert state is not None
        for process in process_tree(state.pid):
            with suppress(psutil.NoSuchProcess):  # a worker of an earlier run ends
                listening |= {
                    connection.laddr.ip
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                }
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_running_services_are_found_again(services: LocalServices) -> None:
    before = services.state("prefect"), services.state("ray")
    services.start(prefect=True, ray=True)
    assert (services.state("prefect"), services.state("ray")) == before
    url = services.prefect_api_url
    assert url is not None
    wait_until(lambda: prefect_responds(url))


def test_another_token_than_the_cluster_s_is_refused_with_what_to_set(services: LocalServices) -> None:
    command = [sys.executable, "-m", "flows.cli.main", "ps", "--address", str(services.ray_address)]
    own = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 32, "COLUMNS": "1000"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"can't connect to {services.ray_address}: " in done.stderr
    assert "; if Ray runs there, set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN (or " in done.stderr


class OtherServer(BaseHTTPRequestHandler):
    """A server that responds as a healthy Prefect server does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.extended
def test_programs_that_take_the_chosen_ports_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ThreadingHTTPServer((local.LOOPBACK, 0), OtherServer)
    Thread(target=other.serve_forever, daemon=True).start()
    taken, is_free, free_port = other.server_port, local.is_free, local.free_port
    # When the ports were chosen, they were still free.
    monkeypatch.setattr(local, "PREFECT_PORT", taken)
    was_free, chosen = iter([True]), iter([taken])
    monkeypatch.setattr(local, "is_free", lambda port: next(was_free, False) or is_free(port))
    monkeypatch.setattr(local, "free_port", lambda: next(chosen, 0) or free_port())
    services = LocalServices(tmp_path)
    try:
        wait_until(lambda: prefect_responds(f"http://{local.LOOPBACK}:{taken}/api"))
        services.start(prefect=True, ray=True)
        states = [services.state(name) for name in ("prefect", "ray")]
        assert [state is not None and state.port != taken for state in states] == [True, True]
        url = services.prefect_api_url
        assert url is not None
        wait_until(lambda: prefect_responds(url))
        assert next(chosen, None) is None
    finally:
        services.stop()
        other.shutdown()
        other.server_close()


@pytest.mark.extended
def test_two_folders_whose_servers_start_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, is_free, both_chose = local.free_port(), local.is_free, Barrier(2)
    monkeypatch.setattr(local, "PREFECT_PORT", usual)
    choosing = iter([True, True])

    def is_free_for_both(port: int) -> bool:
        if next(choosing, False):
            both_chose.wait()
            return True
        return is_free(port)

    monkeypatch.setattr(local, "is_free", is_free_for_both)
    folders = [LocalServices(tmp_path / name) for name in ("first", "second")]
    try:
        with ThreadPoolExecutor() as pool:
            for started in [pool.submit(each.start, prefect=True, ray=False) for each in folders]:
                started.result()
        ports = [state.port for each in folders if (state := each.state("prefect"))]
        assert len(set(ports)) == 2
        assert usual in ports
        wait_until(lambda: all(prefect_responds(str(each.prefect_api_url)) for each in folders))
    finally:
        for each in folders:
            each.stop()


@pytest.mark.extended
def test_old_events_and_flow_runs_leave_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS", "1")
    services, now = LocalServices(tmp_path), datetime.now(UTC)
    try:
        services.start(prefect=True, ray=False)
        with httpx.Client(base_url=f"{services.prefect_api_url}/", timeout=60) as client:

            def post(route: str, body: Any) -> Any:
                response = client.post(route, json=body)
                response.raise_for_status()
                return response.json() if response.content else None

            def found() -> tuple[set[str], set[str]]:
                """Return the names of the flow runs and of the test's events."""
                events = post("events/filter", {"filter": {"event": {"prefix": ["test."]}}})["events"]
                return {run["name"] for run in post("flow_runs/filter", {})}, {event["event"] for event in events}

            flow = post("flows/", {"name": "kept"})["id"]
            for name, days in {"recent": 80, "old": 100}.items():
                post("flow_runs/", {"name": name, "flow_id": flow, "state": {"type": "COMPLETED"}})
                with (
                    closing(sqlite3.connect(services.directory / "prefect/prefect.db", timeout=60)) as database,
                    database,
                ):
                    ended = f"{now - timedelta(days=days):%Y-%m-%d %H:%M:%S.%f}"  # the server's API takes no time
                    database.execute("UPDATE flow_run SET end_time = ? WHERE name = ?", (ended, name))
            events = {"test.recent": timedelta(hours=5), "test.old": timedelta(hours=7)}
            resource = {"prefect.resource.id": "test"}
            post(
                "events",
                [
                    {"id": str(uuid4()), "event": name, "occurred": (now - age).isoformat(), "resource": resource}
                    for name, age in events.items()
                ],
            )
            wait_until(lambda: "test.recent" in found()[1])  # they are written after a while, together
            wait_until(lambda: found() == ({"recent"}, {"test.recent"}))
    finally:
        services.stop()


def test_the_newest_steps_of_a_run_stay_on_the_server(services: LocalServices) -> None:
    name, num_steps, num_kept = f"run-{uuid4().hex}", 12, 3

    @task
    def stage() -> None:
        get_run_logger().info("a log line")

    @flow(flow_run_name="step-{number}")
    def step(number: int) -> None:
        stage()

    @flow(name="train", flow_run_name=name)
    def train() -> str:
        for number in range(num_steps):
            step(number)
            stage()  # as a checkpoint
        return str(flow_run.id)

    async def left(client: PrefectClient, attempt: UUID) -> tuple[set[str], list[str]]:
        """Return the names of the run's steps, and of all task runs of it and of them."""
        steps = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[attempt]))
        )
        of = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[attempt, *(each.id for each in steps)]))
        return {each.name for each in steps}, [each.name for each in await client.read_task_runs(task_run_filter=of)]

    async def delete(attempt: UUID) -> None:
        async with PrefectClient(str(services.prefect_api_url)) as client:
            while len((await left(client, attempt))[1]) < 3 * num_steps:  # the server records them with a delay
                await asyncio.sleep(0.1)
            await delete_old_steps(client, [attempt], num_kept)
            steps, tasks = await left(client, attempt)
            assert steps == {f"step-{number}" for number in range(num_steps - num_kept, num_steps)}
            assert num_kept * 3 <= len(tasks) <= num_kept * 3 + 2  # with what ran since the last deleted step
            await delete_old_steps(client, [attempt], num_steps)  # fewer than are to stay
            assert await left(client, attempt) == (steps, tasks)

    with temporary_settings({PREFECT_API_URL: services.prefect_api_url}):
        attempt = UUID(train())
        asyncio.run(delete(attempt))


CONNECT = """
import sys
from pathlib import Path

import infra
import ray
from flows import train_run
from infra.ray.cluster import connect
from infra.services.local import LocalServices
from schemas.errors import ServiceError

services = LocalServices(Path(sys.argv[1]))
try:
    services.start(prefect=False, ray=True)
    first = services.ray_address
    ray.init(address=first, log_to_driver=False)
    config = {"steps": 1, "model": {"path": "m"}, "data": {"train_path": "t"}, "reward": {"kind": "exact"}}
    for start in (lambda: connect(first), lambda: train_run(config)):
        try:
            start()
        except ServiceError as error:
            print(error)
    assert ray.is_initialized()
    ray.shutdown()
    connect(first)
    job = ray.get_runtime_context().get_job_id()
    connect(first)
    assert ray.get_runtime_context().get_job_id() == job
    other = LocalServices(Path(sys.argv[2]))
    try:
        other.start(prefect=False, ray=True)  # Ray ends a process whose cluster has been gone for 60 seconds
        services.stop()
        connect(other.ray_address)
        print("again", ray.get(ray.remote(num_cpus=0)(lambda: 7).remote()))
        services.start(prefect=False, ray=True)
        connect(services.ray_address)  # the other is there
        assert ray.get_runtime_context().gcs_address == services.ray_address != first
    finally:
        other.stop()
except BaseException:
    services.stop()
    raise
"""


@pytest.mark.command("down")
def test_a_process_is_connected_to_the_cluster_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its cluster is gone, to another one; but one that its own code has connected it to is left alone."""
    down = partial(make_command(monkeypatch, capsys), "down", "--services-dir", str(tmp_path / "one"))
    command = [sys.executable, "-c", CONNECT, str(tmp_path / "one"), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("this process has connected itself to Ray at 127.0.0.1:") == 2
    assert "again 7" in done.stdout
    assert down() == (0, "stopped: ray\n", "")  # which the process has left running
    assert down() == (0, "no local service was running\n", "")
