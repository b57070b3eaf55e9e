"""Sandboxes, in which the programs of trajectories run: a local process, a container, or a class of the user's."""

import asyncio
import functools
import json
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.environments.launch import (
    ERROR_CHARACTERS,
    FOLDERS,
    LOOPBACK,
    PORT,
    RELAY,
    RELAYED,
    close_off,
    end_of,
    fill,
    is_in_use,
    locate,
    programs_folder,
    spawn,
    text_of,
)
from infra.processes.isolated import count_sleeps, kill_all
from rl_core.environments.base import Endpoint, Launch, Sandbox
from rl_core.user_code import import_user_module
from schemas.errors import ConfigError, EnvironmentImportError, ServiceError

logger = logging.getLogger(__name__)

HOME, SOCKET = "/sluice/home", "/sluice/model.sock"  # where a container has what is mounted
MAX_TASKS = 4096  # processes and threads of a container
ASK_SECONDS = 60.0  # for an answer of docker's
LABEL = FOLDERS  # its value is the folder of the process that has started a container

# Waits until the process that has started it has ended, and removes the containers that it has left.
_REMOVER = """
import subprocess, sys, time
program, label = sys.argv[1:]
sys.stdin.read()
for _ in range(5):  # one may just have been created
    found = subprocess.run([program, "ps", "--all", "--quiet", "--filter", "label=" + label], stdout=subprocess.PIPE)
    if found.stdout.split():
        subprocess.run([program, "rm", "--force", "--volumes"] + found.stdout.decode().split())
    time.sleep(1)
"""


class LocalProcess:
    """A process of this machine, in a group of its own, with the run's user and environment variables, and limits.

    Args:
        network: "host": the machine's; "none": one of its own.
    """

    def __init__(self, network: str = "host") -> None:
        self._network = network
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, endpoint: Endpoint) -> str:
        return endpoint.url if self._network == "host" else RELAYED

    async def start(self, launch: Launch) -> None:
        limits = launch.memory_bytes, launch.file_bytes, launch.open_files
        home = {"HOME": str(launch.home), "TMPDIR": str(launch.home)}
        command = locate(launch.command)
        if self._network != "host":
            relay = [sys.executable, "-I", "-S", "-c", LOOPBACK + RELAY, str(PORT), launch.endpoint.socket]
            command = [*relay, *command]
        self._process = spawn(command, launch, limits, {**os.environ, **launch.variables, **home})

    async def wait(self) -> int:
        assert self._process is not None, "the program is not started"
        await end_of(self._process)
        kill_all(self._process)  # what it has left running
        code: int = self._process.returncode
        return code

    def count_sleeps(self) -> dict[str, str] | None:
        """Return how often its threads have stopped running; None if one of them runs now."""
        return {} if self._process is None else count_sleeps(self._process.pid)

    async def kill(self) -> None:
        if self._process is not None:
            kill_all(self._process)
            assert self._process.stdin is not None
            self._process.stdin.close()


class Container:
    """A container of Docker's or Podman's; see `schemas.config.environment.ContainerSandbox`."""

    def __init__(self, image: str, program: str, network: str, options: Sequence[str]) -> None:
        self._image, self._network, self._options = image, network, options
        self._runtime = runtime(program)
        self._name = ""
        self._client: subprocess.Popen[bytes] | None = None
        self._launch: Launch | None = None
        self._is_killed = False

    def url(self, endpoint: Endpoint) -> str:
        return endpoint.url if self._network == "host" else RELAYED

    async def start(self, launch: Launch) -> None:
        user = await asyncio.to_thread(self._runtime.prepare)
        self._launch, self._name = launch, f"{launch.home.parent.parent.name}-{launch.home.parent.name}"
        variables = launch.home.with_name("variables")
        home = {"HOME": HOME, "TMPDIR": HOME}
        variables.write_text("".join(f"{name}={value}\n" for name, value in {**launch.variables, **home}.items()))
        command = self._command(launch, variables, user)
        # The client's own limits: Go reserves much address space.
        limits = resource.getrlimit(resource.RLIMIT_AS)[1], launch.file_bytes, launch.open_files
        self._client = spawn(command, launch, limits, dict(os.environ))

    async def wait(self) -> int:
        assert self._client is not None, "the program is not started"
        assert self._launch is not None
        await end_of(self._client)
        kill_all(self._client)
        code: int = self._client.returncode
        if self._is_killed:
            return code
        await asyncio.to_thread(close_off, self._launch.home)
        if code == 0:
            return code
        # The client ends with such a code, too, if it or the daemon has failed: the container's own state tells.
        asked = await asyncio.to_thread(
            self._runtime.ask, "inspect", "--type=container", "--format={{json .State}}", self._name
        )
        if self._is_killed:  # meanwhile, by the end of its trajectory
            return code
        state = json.loads(asked.stdout) if asked.returncode == 0 else {}
        with self._launch.stderr.open("rb+") as errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - ERROR_CHARACTERS))
            said = text_of(errors.read())
            if state.get("Status") not in ("exited", "stopped") or state.get("ExitCode") != code:
                raise ServiceError(
                    f"{self._runtime.program} failed with exit code {code}, and not the program in the container "
                    f"({state.get('Status') or text_of(asked.stderr)}); its stderr ends with: {said}"
                )
            if state.get("OOMKilled"):
                most = f"{self._launch.memory_bytes:,} bytes (environment.memory_bytes)"
                errors.write(f"\na process of the container was killed: they took more memory than {most}\n".encode())
        return code

    async def kill(self) -> None:
        """Kill the client first, which might else create the container afterwards."""
        if self._client is None:
            return
        self._is_killed = True
        kill_all(self._client)
        assert self._client.stdin is not None
        self._client.stdin.close()
        await asyncio.to_thread(self._runtime.remove, [self._name])

    def _command(self, launch: Launch, variables: Path, user: str) -> list[str]:
        """Return the command that runs the container, whose own entrypoint is left out, attached to its client."""
        relay = [] if self._network == "host" else ["python3", "-I", "-S", "-c", RELAY, str(PORT), SOCKET]
        program, *arguments = [*relay, *launch.command]
        return [
            *(self._runtime.program, "run", f"--name={self._name}", f"--label={LABEL}={launch.home.parent.parent}"),
            *("--pull=never", "--interactive", "--init", "--log-driver=none"),
            *(f"--user={user}", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--network={self._network}"),
            *(f"--memory={launch.memory_bytes}", f"--memory-swap={launch.memory_bytes}", f"--pids-limit={MAX_TASKS}"),
            *(f"--ulimit=fsize={launch.file_bytes}", "--ulimit=core=0"),
            f"--mount=type=bind,source={launch.home},target={HOME}",
            f"--mount=type=bind,source={launch.endpoint.socket},target={SOCKET}",
            *(f"--workdir={HOME}", f"--env-file={variables}"),
            *(option.replace("{workdir}", os.getcwd()) for option in self._options),
            *(f"--entrypoint={program}", self._image, *arguments),
        ]


class ContainerRuntime:
    """Docker or Podman, as this process uses it.

    Attributes:
        program: The command line's program.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self._lock = threading.Lock()
        self._user = ""
        self._remover: subprocess.Popen[bytes] | None = None

    def ask(self, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        """Return how a command has ended, and what it has printed.

        Raises:
            ServiceError: It can't be run, or doesn't end.
        """
        try:
            return subprocess.run(
                [self.program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            what = error.strerror if isinstance(error, OSError) else f"no answer within {ASK_SECONDS:g} s"
            raise ServiceError(f"{self.program} {arguments[0]} on {platform.node()}: {what}") from error

    def find_user(self) -> str:
        """Return as which user a container gets the rights of this process's: without root, root stands for it.

        Raises:
            ServiceError: The daemon doesn't answer.
        """
        return "0:0" if self._is_rootless(self._find_info()) else f"{os.getuid()}:{os.getgid()}"

    def _find_info(self) -> dict[str, Any]:
        """Return what the daemon, or Podman, tells of itself."""
        asked = self.ask("info", "--format={{json .}}")
        info: dict[str, Any] = json.loads(asked.stdout) if asked.returncode == 0 else {}
        if not info or info.get("ServerErrors"):
            said = text_of(asked.stderr) or "; ".join(info.get("ServerErrors") or [f"exit code {asked.returncode}"])
            raise ServiceError(
                f"environment.sandbox: {self.program} on {platform.node()} can't run containers ({said}): start "
                "its daemon, and let this user ask it, as members of the group docker may"
            )
        return info

    def _is_rootless(self, info: Mapping[str, Any]) -> bool:
        podman: bool = info.get("host", {}).get("security", {}).get("rootless", False)
        return podman or "name=rootless" in (info.get("SecurityOptions") or [])

    def check(self, image: str, network: str) -> None:
        """Check that containers of an image can be run on this machine.

        Raises:
            ConfigError: There is no such program, image or network.
            ServiceError: The daemon doesn't answer, or can't limit what containers take.
        """
        if shutil.which(self.program) is None:
            raise ConfigError(
                f"environment.sandbox.program: there is no program {self.program!r} on {platform.node()}; install "
                "Docker or Podman there, or name the path of its command"
            )
        info = self._find_info()
        if unlimited := [name for name in ("MemoryLimit", "PidsLimit") if info.get(name) is False]:
            raise ServiceError(
                f"environment.sandbox: {self.program} on {platform.node()} limits nothing that containers take "
                f"({', '.join(unlimited)} of its info): without root, it needs cgroups version 2 with their delegation"
            )
        if network == "host" and "host" not in info and self._is_rootless(info):
            raise ConfigError(
                f'environment.sandbox.network = "host": {self.program} on {platform.node()} runs without root, so that '
                'its own network is not the machine\'s; set "none" or "bridge"'
            )
        asked = self.ask("image", "inspect", "--format={{.Id}}", image)
        if asked.returncode != 0:
            raise ConfigError(
                f"environment.sandbox.image: there is no image {image!r} on {platform.node()} "
                f"({text_of(asked.stderr)}); Sluice pulls none: {self.program} pull {image}, or build it there"
            )

    def prepare(self) -> str:
        """Return the user of containers; first, once, remove those that processes have left which were killed."""
        with self._lock:
            if not self._user:
                user = self.find_user()
                self._remove_left()
                command = [sys.executable, "-I", "-S", "-c", _REMOVER, self.program, f"{LABEL}={programs_folder()}"]
                nothing = subprocess.DEVNULL
                self._remover = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
                )
                self._user = user
        return self._user

    def remove(self, containers: Sequence[str]) -> None:
        """Kill and remove containers, of which some may be gone already.

        Raises:
            ServiceError: One can't be removed.
        """
        asked = self.ask("rm", "--force", "--volumes", *containers)
        said = text_of(asked.stderr)
        is_gone = "no such container" in said.lower() or "already in progress" in said
        if asked.returncode != 0 and not is_gone:
            raise ServiceError(
                f"{self.program} rm --force {' '.join(containers)}: {said}; it is tried again at a start"
            )

    def _remove_left(self) -> None:
        found = self.ask("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}").stdout.decode().split()
        if found:  # what can't be removed now is left to the next start
            shown = f'--format={{{{.Id}}}} {{{{index .Config.Labels "{LABEL}"}}}}'
            lines = self.ask("inspect", "--type=container", shown, *found).stdout.decode().splitlines()
            left = [name for name, _, owner in (line.partition(" ") for line in lines) if not is_in_use(owner)]
            try:
                if left:
                    self.remove(left)
            except ServiceError as error:
                logger.warning("containers of ended processes are left: %s", error)


runtime = functools.cache(ContainerRuntime)


def open_sandbox(kind: str, **settings: Any) -> Sandbox:
    """Return a sandbox for one program; see `schemas.config.environment.SandboxConfig`.

    Raises:
        EnvironmentImportError: The user's class can't be imported, or is none.
    """
    if kind == "process":
        return LocalProcess(**settings)
    if kind == "container":
        return Container(**settings)
    path = settings["path"]
    module, name = import_user_module("environment.sandbox.path", path, EnvironmentImportError)
    found = getattr(module, name, None)
    missing = [each for each in ("url", "start", "wait", "kill") if not callable(getattr(found, each, None))]
    if missing:
        raise EnvironmentImportError(
            f"environment.sandbox.path {path!r}: {name!r} of {module.__file__} has no {', '.join(missing)}; define a "
            "class there with the methods of rl_core.environments.base.Sandbox"
        )
    made: Sandbox = found(**settings["arguments"])  # type: ignore[misc]
    return made


@functools.cache
def network_fault() -> str:
    """Return why a process of this machine can't have a network of its own; empty if it can."""
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", LOOPBACK], stderr=subprocess.PIPE)
    return text_of(ended.stderr) if ended.returncode else ""


def check_sandbox(settings: Mapping[str, Any], command: Sequence[str]) -> None:
    """Check that this machine can start a program; a user's class shows that when it does.

    Raises:
        ConfigError: There is no such program or image, or no network of its own.
        ServiceError: There is no daemon that runs containers.
    """
    if settings["kind"] == "container":
        runtime(settings["program"]).check(settings["image"], settings["network"])
    elif settings["kind"] == "process":
        if shutil.which(program := locate(fill(command[:1], {}))[0]) is None:
            raise ConfigError(
                f"environment.command: there is no program {program!r} on {platform.node()}; name one on PATH, or a "
                "path from the run's working directory, of a file that may be executed"
            )
        if settings["network"] == "auto":
            fault = network_fault()
            level, found = (logging.WARNING, f"host, as {fault}") if fault else (logging.INFO, "none")
            logger.log(level, 'environment.sandbox.network = "auto" on %s: %s', platform.node(), found)
        if settings["network"] == "none" and (fault := network_fault()):
            raise ConfigError(
                f'environment.sandbox.network = "none" on {platform.node()}: {fault}; let users make '
                "namespaces there (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or "
                'set environment.sandbox.kind = "container"'
            )
