"""Local services: a Prefect server (SQLite) and a Ray head, both on loopback, both outliving the driver.

They are started if no other ones are configured, found again by the next command through one small state file each, and
stopped by `sluice down`. So columns and workers survive a killed driver, and the Prefect UI stays up.
"""

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from schemas.base import Frozen
from schemas.errors import ServiceError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PREFECT_PORT = 4200
# -P: without the working directory on the module path, where any file might shadow a module.
RAY_COMMAND = (sys.executable, "-P", "-m", "ray.scripts.scripts")
START_TIMEOUT_SECONDS = 120
HEALTH_TIMEOUT_SECONDS = 5
STOP_TIMEOUT_SECONDS = 5  # after which processes are killed; they have nothing to save

# Ray binds all its ports to loopback only if it considers clusters unsupported; the head and its clients must agree.
RAY_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}

PREFECT_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # as `-P`, for the server's own child processes too
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Batched writes avoid "database is locked" while a step's events arrive: SQLite allows one writer at a time.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
}


class ServiceState(Frozen):
    """A running service: its process and its port."""

    pid: int
    started: float  # the process's creation time, which tells it from a later process with the same pid
    port: int

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"


class LocalServices:
    """The services whose state is in one directory.

    Args:
        directory: The folder of the state files, the logs and Prefect's database.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()

    def start(self, *, prefect: bool, ray: bool) -> None:
        """Start the requested services that aren't running, in parallel, and wait until they respond.

        Raises:
            ServiceError: A service does not respond in time; the message names its log.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._lock():
            started = []
            if prefect and self.state("prefect") is None:
                started.append(self._spawn_prefect())
            if ray and self.state("ray") is None:
                started.append(self._spawn_ray())
            try:
                for service in tuple(started):
                    if not self._wait(*service):
                        started.append(self._spawn_prefect())
                        self._wait(*started[-1])
            except BaseException:
                for _, process, _ in started:
                    _stop_process_tree(process.pid)
                raise

    def state(self, name: str) -> ServiceState | None:
        """Return the state of the service `name` ("prefect" or "ray") if its process is alive, else None."""
        path = self._state_path(name)
        if not path.exists():
            return None
        state = ServiceState.model_validate_json(path.read_text())
        try:
            alive = abs(psutil.Process(state.pid).create_time() - state.started) < 1.0
        except psutil.NoSuchProcess:
            alive = False
        return state if alive else None

    @property
    def prefect_api_url(self) -> str | None:
        state = self.state("prefect")
        return f"http://{state.address}/api" if state else None

    @property
    def ray_address(self) -> str | None:
        state = self.state("ray")
        return state.address if state else None

    def stop(self) -> list[str]:
        """Stop every service started from this directory; return the names of those that were running."""
        stopped = []
        for name in ("prefect", "ray"):
            state = self.state(name)
            if state is not None:
                _stop_process_tree(state.pid)
                stopped.append(name)
            self._state_path(name).unlink(missing_ok=True)
        return stopped

    def _spawn_prefect(self) -> tuple[str, subprocess.Popen[bytes], int]:
        port = PREFECT_PORT if _is_free(PREFECT_PORT) else _free_port()
        api_url = f"http://{LOOPBACK}:{port}/api"
        environment = {"PREFECT_HOME": str(self.directory / "prefect"), "PREFECT_UI_API_URL": api_url}
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, f"--port={port}"]
        return "prefect", self._spawn("prefect", command, PREFECT_ENVIRONMENT | environment), port

    def _spawn_ray(self) -> tuple[str, subprocess.Popen[bytes], int]:
        # A head needs a token but doesn't make one; Ray's own command makes the user's token if it doesn't exist.
        generate = [*RAY_COMMAND, "get-auth-token", "--generate"]
        token = subprocess.run(generate, env={**os.environ, **RAY_ENVIRONMENT}, capture_output=True, check=False)
        if token.returncode:
            raise ServiceError(f"Ray can't create its authentication token: {token.stderr.decode().strip()}")
        port = _free_port()
        command = [*RAY_COMMAND, "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"]
        command += [f"--node-ip-address={LOOPBACK}", f"--port={port}", f"--ray-client-server-port={_free_port()}"]
        command += ["--dashboard-agent-listen-port=0", "--include-log-monitor=false"]
        return "ray", self._spawn("ray", command, RAY_ENVIRONMENT), port

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log_path(name).open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # so that a Ctrl-C or kill of the driver doesn't reach it
            )

    def _wait(self, name: str, process: subprocess.Popen[bytes], port: int) -> bool:
        """Wait until a service responds; return False if Prefect exited because its usual port was taken meanwhile."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._responds(name, process.pid, port):
            if process.poll() is not None or time.monotonic() > deadline:
                if process.returncode is not None and port == PREFECT_PORT and not _is_free(port):
                    return False
                outcome = f"exited with {process.returncode}" if process.returncode is not None else "did not respond"
                raise ServiceError(
                    f"the local {name} service {outcome} within {START_TIMEOUT_SECONDS} s; see {self._log_path(name)}"
                )
            time.sleep(0.1)
        started = psutil.Process(process.pid).create_time()
        state = ServiceState(pid=process.pid, started=started, port=port)
        self._state_path(name).write_text(state.model_dump_json())
        logger.info("started %s at %s (pid %d)", name, state.address, state.pid)
        return True

    def _responds(self, name: str, pid: int, port: int) -> bool:
        if name == "prefect":  # another folder's server may respond at this port, if both were started at once
            return _listens(pid, port) and prefect_responds(f"http://{LOOPBACK}:{port}/api")
        # The port opens before the node is registered; `ray start` prints this line afterwards.
        return not _is_free(port) and b"Ray runtime started" in self._log_path("ray").read_bytes()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies
            yield

    def _state_path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _log_path(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def prefect_responds(api_url: str) -> bool:
    """Return whether a healthy Prefect server responds at `api_url`."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=HEALTH_TIMEOUT_SECONDS) as response:
            return bool(json.load(response))
    except (OSError, ValueError):
        return False


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started; nothing if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) != 0


def _listens(pid: int, port: int) -> bool:
    """Return whether the process or one of its children listens at a port."""
    try:
        connections = [found for process in process_tree(pid) for found in process.net_connections("tcp")]
    except psutil.NoSuchProcess:
        return False
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in connections)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _stop_process_tree(pid: int) -> None:
    processes = process_tree(pid)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
