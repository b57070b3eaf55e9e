"""Local services that died, that were left over or that fail to start: plain processes stand in for them."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.services import local
from infra.services.local import LocalServices, ServiceState, server_environment
from infra.services.processes import process_start
from schemas.errors import ServiceError
from tests.support.progress import wait_until


def test_a_service_that_died_or_whose_pid_was_reused_is_not_running(tmp_path: Path) -> None:
    services = LocalServices(tmp_path)
    own = process_start(os.getpid())
    assert own
    boot, ticks = own.split("/")
    for started, running in ((own, True), (f"{boot}/{int(ticks) - 1}", False), (f"another-boot/{ticks}", False)):
        state = ServiceState(pid=os.getpid(), started=started, port=1)
        record(services, "ray", state)
        assert (services.state("ray") == state) is running
    assert services.state("prefect") is None


def test_a_users_own_retention_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = local.PREFECT_RETENTION
    assert server_environment().items() >= bounds.items()
    monkeypatch.setenv("PREFECT_SERVER_EVENTS_RETENTION_PERIOD", "P7D")
    assert server_environment().items() >= (bounds | {"PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D"}).items()


@pytest.mark.parametrize(
    ("kinds", "deletes"),
    [(None, True), ("flow_runs", True), ("events, flow_runs", True), ("True", True), ("events", False), ("", False)],
)
def test_a_user_may_keep_all_flow_runs(monkeypatch: pytest.MonkeyPatch, kinds: str | None, deletes: bool) -> None:
    name = "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED"
    monkeypatch.delenv(name, raising=False) if kinds is None else monkeypatch.setenv(name, kinds)
    assert local.deletes_flow_runs() is deletes


def record(services: LocalServices, name: str, state: ServiceState) -> None:
    services.directory.mkdir(exist_ok=True)
    (services.directory / f"{name}.json").write_text(state.model_dump_json())


def test_a_service_is_known_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services, started = LocalServices(tmp_path), process_start(os.getpid())
    assert started
    record(services, "ray", ServiceState(pid=os.getpid(), started=started, port=1))
    was = psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: was + 3600)  # from which times of day are computed
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600)
    assert services.state("ray") is not None


def test_machines_that_mount_a_folder_have_services_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, started = LocalServices(tmp_path), process_start(os.getpid())
    assert started
    record(here, "ray", ServiceState(pid=os.getpid(), started=started, port=1))
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    there = LocalServices(tmp_path)
    assert there.state("ray") is None
    assert there.stop() == []
    assert here.state("ray") is not None


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if nobody has asked for its exit code."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("action", ["start", "stop"])
def test_a_service_whose_starter_was_killed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    never_ready = "import sys, time; time.sleep(3600)"
    starter = f"""
from pathlib import Path
from infra.services import local
local.PREFECT_COMMAND = ({sys.executable!r}, "-c", {never_ready!r})
local.LocalServices(Path({str(tmp_path)!r})).start(prefect=True, ray=False)
"""
    command = subprocess.Popen([sys.executable, "-c", starter])
    services = LocalServices(tmp_path)
    recorded = services.directory / "prefect.json"
    wait_until(recorded.exists)
    command.kill()
    command.wait()
    left_over = psutil.Process(json.loads(recorded.read_text())["pid"])
    assert left_over.is_running()
    assert services.state("prefect") is None
    if action == "stop":
        assert services.stop() == ["prefect"]
    else:
        monkeypatch.setattr(local, "PREFECT_COMMAND", ("/bin/false",))
        with pytest.raises(ServiceError):
            services.start(prefect=True, ray=False)
    assert has_ended(left_over)


def test_what_a_dead_service_has_left_is_stopped_with_it(tmp_path: Path) -> None:
    """A process that has lost its parent is still found by the session that the service led."""
    orphan = "import subprocess, sys; print(subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL).pid)"
    service = subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, start_new_session=True)
    started = process_start(service.pid)
    assert started
    state = ServiceState(pid=service.pid, started=started, port=1)
    assert service.stdout is not None
    left_over = psutil.Process(int(service.stdout.readline()))
    service.wait()
    record(LocalServices(tmp_path), "ray", state)
    assert LocalServices(tmp_path).stop() == []
    assert has_ended(left_over)


def test_a_full_temporary_folder_is_told_before_ray_starts_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MIN_TEMPORARY_BYTES", 2**60)  # more than any disk has
    monkeypatch.setattr(local, "PREFECT_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "not" / "there"))
    services = LocalServices(tmp_path)
    with pytest.raises(ServiceError, match=r"not/there has \d+ MiB left, but Ray needs .* set RAY_TMPDIR") as caught:
        services.start(prefect=True, ray=True)
    assert "\n" not in str(caught.value)
    assert not (services.directory / "ray.json").exists()
    prefect = json.loads((services.directory / "prefect.json").read_text())
    assert not psutil.pid_exists(prefect["pid"]) or psutil.Process(prefect["pid"]).status() == psutil.STATUS_ZOMBIE


def test_a_service_that_fails_to_start_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = LocalServices(tmp_path)
    failing = (sys.executable, "-c", "raise TypeError('no items')")
    said = r"its last error: TypeError: no items"
    for command, reason in ((("/bin/false",), ""), (failing, f"{said}; ")):
        monkeypatch.setattr("infra.services.local.PREFECT_COMMAND", command)
        with pytest.raises(ServiceError, match=rf"prefect service exited with 1; {reason}see .*prefect\.log$"):
            services.start(prefect=True, ray=False)
    assert services.state("prefect") is None
    assert services.stop() == []


@pytest.mark.parametrize(
    ("reason", "starts"),
    [("the port is already in use", 5), ("The current node timed out during startup.", 5), ("no such option", 1)],
)
def test_what_another_start_may_not_meet_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, starts: int
) -> None:
    counted = tmp_path / "starts"
    program = f"open({str(counted)!r}, 'a').write('.'); print({reason!r}); raise SystemExit(1)"
    monkeypatch.setattr(local, "PREFECT_COMMAND", (sys.executable, "-c", program))
    with pytest.raises(ServiceError, match="exited with 1"):
        LocalServices(tmp_path).start(prefect=True, ray=False)
    assert counted.read_text() == "." * starts
