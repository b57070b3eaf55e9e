"""Local services: a Prefect server (SQLite) and a Ray head, both on loopback, both outliving the driver.

They are started if no other ones are configured, found again by the next command through one small state file each, and
stopped by `sluice down`. So columns and workers survive a killed driver, and the Prefect UI stays up. Each machine
has a folder of its own for them, as several may mount the same working directory.
"""

import fcntl
import json
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from infra.services.prefect_api import prefect_responds
from infra.services.processes import (
    STOP_TIMEOUT_SECONDS,
    listens,
    process_name,
    process_start,
    process_tree,
    stop_process_tree,
)
from infra.variables import LOCAL_RAY_VARIABLES
from schemas.base import Frozen
from schemas.errors import ServiceError

LOOPBACK = "127.0.0.1"
# Below Linux's ephemeral ports, from which any connection takes one, and above Ray's default range of workers' ports.
SERVICE_PORTS = range(20_000, 32_768)
logger = logging.getLogger(__name__)
PREFECT_PORT = 4200
PROMETHEUS_TARGETS = "prometheus.json"  # in the services' folder; for Prometheus' file_sd_configs
RAY_COMMAND = (sys.executable, "-P", "-m", "ray.scripts.scripts")
MIN_TEMPORARY_BYTES = 2**26  # a started Ray has written some MiB
START_TIMEOUT_SECONDS = 600  # on a busy machine; one that exits is noticed at once
MAX_STARTS = 5  # of a service whose port another program takes each time, or for which the machine is too busy
# Ray binds all its ports to loopback only if it considers clusters unsupported; the head and its clients must agree.
RAY_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}  # whatever the user has set
PREFECT_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # as `-P`, for the server's own child processes too
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # In memory, a lease would be lost with the server, and the slot of a killed run be taken for good.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # Batched writes avoid "database is locked" while a step's events arrive: SQLite allows one writer at a time.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
}
# What bounds the server's database, unless the user has set it: three quarters of what a step adds are events.
PREFECT_RETENTION = {
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "PT6H",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # the latter 90 days after their end
}
MAX_ERROR = 300  # characters of the last error in a service's log
WATCH_SECONDS = 1.0
MAX_FAILED_STARTS = 3  # starts that fail in a row, after which the watchdog gives up


def server_environment() -> dict[str, str]:
    """Return the variables of a local Prefect server: of what bounds its database, the user's own win."""
    return {**PREFECT_RETENTION, **os.environ, **PREFECT_ENVIRONMENT}


def deletes_flow_runs() -> bool:
    """Return whether old flow runs leave the database of a local server, unless the user has chosen that they stay."""
    kinds = server_environment()["PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED"].lower().split(",")
    return not {"flow_runs", "true", "1"}.isdisjoint(kind.strip() for kind in kinds)


def is_free(port: int) -> bool:
    """Return whether nothing listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) != 0


def free_port() -> int:
    """Return a port for a service that will bind it some seconds later, when another process must not have taken it.

    The kernel's own choice (port 0) may be given to the next process that asks, or to any connection.
    """
    while True:
        port = random.SystemRandom().choice(SERVICE_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port


# -P: without the working directory on the module path, where any file might shadow a module.
PREFECT_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("prefect_server.py")))


class ServiceState(Frozen):
    """A service: its process and its port."""

    pid: int
    started: str  # see `process_start`
    port: int
    is_ready: bool = True  # it has responded; one whose starter was killed before is ended by the next command

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"


class _Started(NamedTuple):
    """A service that was started, and the ports that were chosen for it; it will respond at the first."""

    name: str
    process: subprocess.Popen[bytes]
    ports: tuple[int, ...]


class _StartAgainError(ServiceError):
    """A service exited as another program has its port, or as the machine is too busy for the time that Ray allows."""


class LocalServices:
    """This machine's services whose state is in one directory.

    Args:
        directory: The folder that has one for each machine.

    Attributes:
        directory: This machine's: the folder of the state files, the logs and Prefect's database.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve() / (socket.gethostname() or "localhost")

    def start(self, *, prefect: bool, ray: bool) -> None:
        """Start the requested services that aren't running, in parallel, and wait until they respond.

        Raises:
            ServiceError: A service does not respond in time, and the message names its log; or Ray's temporary folder
                is full.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._lock():
            started = []
            try:
                if prefect and self.state("prefect") is None:
                    self._stop("prefect")
                    started.append(self._spawn_prefect(self._prefect_port()))
                if ray and not self._ray_is_whole():
                    self._stop("ray")
                    started.append(self._spawn_ray(free_port()))
                for number, service in enumerate(tuple(started)):
                    started[number] = self._wait_or_move(service)
            except BaseException:
                for service in started:
                    stop_process_tree(service.process.pid)
                raise

    def restart_prefect(self) -> bool:
        """Start the Prefect server again, at its port and on its database, if it has died; return whether it had.

        A server that was stopped on purpose (`stop`) stays stopped.

        Raises:
            ServiceError: Another program has taken its port, or it does not respond in time.
        """
        last = self._recorded("prefect")
        if last is None or _is_alive(last):
            return False
        with self._lock():
            last = self._recorded("prefect")
            if last is None or _is_alive(last):  # another command has stopped it or started it again
                return False
            if not _becomes_free(last.port):
                raise ServiceError(f"the local Prefect server died, and another program took {last.address}")
            service = self._spawn_prefect(last.port)
            try:
                self._wait(service)
            except BaseException:
                stop_process_tree(service.process.pid)
                raise
            return True

    def announce_metrics(self, targets: Sequence[str]) -> None:
        """Write the addresses (`host:port`) of Ray's metrics to the file by which Prometheus finds them."""
        groups = [{"labels": {"job": "ray"}, "targets": list(targets)}]
        (self.directory / PROMETHEUS_TARGETS).write_text(json.dumps(groups))

    def state(self, name: str) -> ServiceState | None:
        """Return the state of the service `name` ("prefect" or "ray") if it has started and is alive, else None."""
        state = self._recorded(name)
        return state if state is not None and state.is_ready and _is_alive(state) else None

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
        if not self.directory.is_dir():
            return []
        stopped = []
        with self._lock():  # so that no driver starts one again meanwhile
            for name in ("prefect", "ray"):
                if self._stop(name):
                    stopped.append(name)
                self._state_path(name).unlink(missing_ok=True)
        return stopped

    def _stop(self, name: str) -> bool:
        """Stop what is left of a service, started or not; return whether it was alive."""
        state = self._recorded(name)
        if state is None or _is_reused(state):
            return False
        is_alive = _is_alive(state)
        stop_process_tree(state.pid)  # if it is dead, what it started may live on: Ray's agents do so for minutes
        return is_alive

    def _ray_is_whole(self) -> bool:
        """Return whether Ray runs with all of its processes."""
        state = self.state("ray")
        processes = process_tree(state.pid) if state else []
        return {"raylet", "gcs_server"} <= {process_name(process) for process in processes}

    def _recorded(self, name: str) -> ServiceState | None:
        """Return the state of a service that was not stopped since it was started, even if it died or isn't ready."""
        path = self._state_path(name)
        return ServiceState.model_validate_json(path.read_text()) if path.exists() else None

    def _prefect_port(self) -> int:
        """Return the port of the last server if it is free, so that open pages of its UI work again."""
        last = self._recorded("prefect")
        usual = (last.port, PREFECT_PORT) if last else (PREFECT_PORT,)
        return next((port for port in usual if is_free(port)), None) or free_port()

    def _spawn_prefect(self, port: int) -> "_Started":
        api_url = f"http://{LOOPBACK}:{port}/api"
        own = {"PREFECT_HOME": str(self.directory / "prefect"), "PREFECT_UI_API_URL": api_url}
        command = [*PREFECT_COMMAND, "server", "start", "--host", LOOPBACK, f"--port={port}"]
        return self._spawn("prefect", command, server_environment() | own, port)

    def _spawn_ray(self, port: int) -> "_Started":
        if (fault := _temporary_fault()) is not None:
            raise ServiceError(fault)
        _make_ray_token()
        command = [*RAY_COMMAND, "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"]
        command += [f"--node-ip-address={LOOPBACK}", f"--port={port}", "--include-log-monitor=false"]
        command += [f"--ray-client-server-port={(client_port := free_port())}"]  # unused; else it takes 10001
        # Ray binds these before it names them to others; `announce_metrics` tells Prometheus.
        command += ["--dashboard-agent-listen-port=0", "--metrics-export-port=0"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]  # any: another Ray would hand out the same range
        environment = {**LOCAL_RAY_VARIABLES, **os.environ, **RAY_ENVIRONMENT}
        return self._spawn("ray", command, environment, port, client_port)

    def _spawn(self, name: str, command: list[str], environment: dict[str, str], *ports: int) -> "_Started":
        with self._log_path(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # so that a Ctrl-C or kill of the driver doesn't reach it
            )
        self._record(name, process.pid, ports[0], is_ready=False)
        return _Started(name, process, ports)

    def _wait_or_move(self, service: "_Started") -> "_Started":
        """Wait until a service responds; start it again, at another port, if that may help."""
        for starts_left in reversed(range(MAX_STARTS)):
            try:
                self._wait(service)
                break
            except BaseException as error:
                stop_process_tree(service.process.pid)
                if not isinstance(error, _StartAgainError) or not starts_left:
                    raise
            spawn = self._spawn_prefect if service.name == "prefect" else self._spawn_ray
            service = spawn(free_port())
        return service

    def _wait(self, service: "_Started") -> None:
        """Wait until a service responds."""
        name, process, ports = service
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._responds(name, process.pid, ports):
            log = self._log_path(name)
            if process.poll() is not None:
                error = _StartAgainError if _may_start_again(log) or not all(map(is_free, ports)) else ServiceError
                raise error(f"the local {name} service exited with {process.returncode}; {_reason(name, log)}")
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"the local {name} service did not respond in {START_TIMEOUT_SECONDS} s; {_reason(name, log)}"
                )
            time.sleep(0.1)
        self._record(name, process.pid, ports[0], is_ready=True)
        logger.info("started %s at %s:%d (pid %d)", name, LOOPBACK, ports[0], process.pid)

    def _record(self, name: str, pid: int, port: int, is_ready: bool) -> None:
        state = ServiceState(pid=pid, started=process_start(pid) or "", port=port, is_ready=is_ready)
        temporary = self._state_path(name).with_suffix(".tmp")
        temporary.write_text(state.model_dump_json())
        temporary.replace(self._state_path(name))  # a reader sees all of it

    def _responds(self, name: str, pid: int, ports: Sequence[int]) -> bool:
        if any(map(is_free, ports)):
            return False
        if name == "prefect":
            is_ready = prefect_responds(f"http://{LOOPBACK}:{ports[0]}/api")
        else:  # its port opens before the node is registered; `ray start` prints this line afterwards
            is_ready = b"Ray runtime started" in self._log_path("ray").read_bytes()
        return is_ready and all(listens(pid, port) for port in ports)  # and not another program

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies
            yield

    def _state_path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _log_path(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def _make_ray_token() -> None:
    """Have Ray's own command make the user's token if there is none: a head needs one but doesn't make it."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_TOKEN") or Path(path).is_file():
        return
    generate = [*RAY_COMMAND, "get-auth-token", "--generate"]
    token = subprocess.run(generate, env={**os.environ, **RAY_ENVIRONMENT}, capture_output=True, check=False)
    if token.returncode:
        raise ServiceError(f"Ray can't create its authentication token: {token.stderr.decode().strip()}")


def _reason(name: str, log: Path) -> str:
    """Return why a service has not started, as far as it is known, and where to look."""
    fault = _temporary_fault() if name == "ray" else None
    errors = [line for line in log.read_text(errors="replace").splitlines() if re.match(r"[\w.]+Error: ", line)]
    last = f"its last error: {errors[-1][:MAX_ERROR]}" if errors else None
    return "; ".join(filter(None, (fault, last, f"see {log}")))


def _temporary_fault() -> str | None:
    """Return why Ray can't work in its temporary folder, which it fills with sockets and logs; None if it can."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    place = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)  # Ray makes the rest
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return f"Ray's temporary folder {folder} can't be used ({error}); set RAY_TMPDIR to another one"
    if free >= MIN_TEMPORARY_BYTES:
        return None
    return (
        f"Ray's temporary folder {folder} has {free // 2**20} MiB left, but Ray needs {MIN_TEMPORARY_BYTES // 2**20} "
        "MiB for its sockets and logs: free some space, or set RAY_TMPDIR to another folder"
    )


def _may_start_again(log: Path) -> bool:
    """Return whether a service's log tells of a reason that may be gone at another start.

    That is a port that it could not bind, or the 30 seconds that Ray's node waits for its own processes.
    """
    text = log.read_text(errors="replace").lower()
    return any(reason in text for reason in ("already in use", "is already running at", "timed out during startup"))


def _is_alive(state: ServiceState) -> bool:
    try:  # a zombie is a child of this process, which started the service
        return not _is_reused(state) and psutil.Process(state.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_reused(state: ServiceState) -> bool:
    """Return whether another process has the service's pid."""
    return process_start(state.pid) not in (None, state.started)


def _becomes_free(port: int) -> bool:
    """Wait until a process that was killed has closed its port; return False if it stays taken."""
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while not (closed := is_free(port)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return closed


@contextmanager
def prefect_kept_running(services: LocalServices) -> Iterator[None]:
    """Start the folder's Prefect server again whenever it dies during the block, at its port and on its database."""
    ended = threading.Event()
    watchdog = threading.Thread(target=_watch, args=(services, ended), name="prefect-watchdog", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        ended.set()
        watchdog.join()  # a server that it is starting would otherwise be left behind unrecorded


def _watch(services: LocalServices, ended: threading.Event) -> None:
    failures = 0
    while failures < MAX_FAILED_STARTS and not ended.wait(WATCH_SECONDS):
        try:
            if services.restart_prefect():
                logger.warning("the local Prefect server had died, and was started again")
            failures = 0
        except (ServiceError, OSError) as error:
            failures += 1
            logger.warning("the local Prefect server can't be started again: %s", error)
