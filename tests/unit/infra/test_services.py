"""Local services that died, that were left over or that fail to start: plain processes stand in for them."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.services import local
from infra.services.local import LocalServices, ServiceState
from schemas.errors import ServiceError
from tests.support.progress import wait_until


def test_a_service_that_died_or_whose_pid_was_reused_is_not_running(tmp_path: Path) -> None:
    services = LocalServices(tmp_path)
    me = psutil.Process()
    for started, running in ((me.create_time(), True), (me.create_time() - 100, False)):
        state = ServiceState(pid=me.pid, started=started, port=1)
        (tmp_path / "ray.json").write_text(state.model_dump_json())
        assert (services.state("ray") == state) is running
    assert services.state("prefect") is None


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
    recorded = tmp_path / "prefect.json"
    wait_until(recorded.exists)
    command.kill()
    command.wait()
    left_over = psutil.Process(json.loads(recorded.read_text())["pid"])
    assert left_over.is_running()
    services = LocalServices(tmp_path)
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
    state = ServiceState(pid=service.pid, started=psutil.Process(service.pid).create_time(), port=1)
    assert service.stdout is not None
    left_over = psutil.Process(int(service.stdout.readline()))
    service.wait()
    (tmp_path / "ray.json").write_text(state.model_dump_json())
    assert LocalServices(tmp_path).stop() == []
    assert has_ended(left_over)


def test_a_service_that_fails_to_start_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.services.local.PREFECT_COMMAND", ("/bin/false",))
    services = LocalServices(tmp_path)
    with pytest.raises(ServiceError, match=r"prefect service exited with 1.*prefect\.log"):
        services.start(prefect=True, ray=False)
    assert services.state("prefect") is None
    assert services.stop() == []
