"""Sandboxes, in which the programs of trajectories run: a local process, a container, or a class of the user's.

Without a network, a program asks the model at a port of a loopback interface of its own. A small relay, which is
started before it, passes that on to the Unix socket of the endpoint, which a container has mounted.
"""

import asyncio
import fcntl
import functools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.processes import lifeline
from infra.processes.isolated import kill_all
from rl_core.environments.base import Endpoint, Launch, Sandbox
from rl_core.user_code import import_user_module
from schemas.errors import ConfigError, EnvironmentImportError, ServiceError

PORT = 8411  # of the relay
RELAYED = f"http://127.0.0.1:{PORT}"
HOME, SOCKET = "/sluice/home", "/sluice/model.sock"  # where a container has what is mounted
MAX_TASKS = 4096  # processes and threads of a container
ASK_SECONDS = 60.0  # for an answer of docker's
ERROR_CHARACTERS = 600
LABEL = "sluice-programs"  # its value is the folder of the process that has started a container
_PREFIX = f"{LABEL}-{os.getuid()}-"
# Limits itself, and is then replaced by the program, which ends with this process: the kernel kills its group.
_LAUNCHER = """
import os, resource, runpy, sys
lifeline, task, memory, size, files, *command = sys.argv[1:]
runpy.run_path(lifeline)["end_with_parent"](with_programs=True)
os.dup2(int(task), 0)
for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(kind)[1]
    most = int(most) if hard == resource.RLIM_INFINITY else min(int(most), hard)
    resource.setrlimit(kind, (most, most))
resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]} can't be started: {error.strerror}")
"""
# Gives this process a network of its own, which has a loopback interface only; the users are the same.
_LOOPBACK = """
import ctypes, fcntl, os, socket, struct, sys
user, group = os.getuid(), os.getgid()
try:
    if ctypes.CDLL(None, use_errno=True).unshare(0x50000000):  # CLONE_NEWUSER, CLONE_NEWNET
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
except OSError as error:
    sys.exit(f"the kernel gives this user no network namespace: {error.strerror}")
"""
# Listens before the program takes this process's place; the relay itself is no child of the program's.
_RELAY = """
import os, signal, socket, sys, threading
port, path = int(sys.argv[1]), sys.argv[2]
command = sys.argv[3:]
def copy(source, target):
    try:
        data = source.recv(65536)
        while data:
            target.sendall(data)
            data = source.recv(65536)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def relay(client):
    with client, socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        answers = threading.Thread(target=copy, args=(server, client), daemon=True)
        answers.start()
        copy(client, server)
        answers.join()
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen(1024)
child = os.fork()
if child == 0:
    if os.fork():
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # which the program may send its group
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(2**18)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    while True:
        threading.Thread(target=relay, args=(listener.accept()[0],), daemon=True).start()
os.waitpid(child, 0)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(command[0] + " can't be started: " + str(error.strerror))
"""
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
        command = resolve(launch.command)
        if self._network != "host":
            relay = [sys.executable, "-I", "-S", "-c", _LOOPBACK + _RELAY, str(PORT), launch.endpoint.socket]
            command = [*relay, *command]
        self._process = _spawn(command, launch, limits, {**os.environ, **launch.variables, **home})

    async def wait(self) -> int:
        assert self._process is not None, "the program is not started"
        await _end_of(self._process)
        kill_all(self._process)  # what it has left running
        code: int = self._process.returncode
        return code

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
        self._client = _spawn(command, launch, limits, dict(os.environ))

    async def wait(self) -> int:
        assert self._client is not None, "the program is not started"
        assert self._launch is not None
        await _end_of(self._client)
        kill_all(self._client)
        code: int = self._client.returncode
        if code == 0 or self._is_killed:
            return code
        # The client ends with such a code, too, if it or the daemon has failed: the container's own state tells.
        asked = await asyncio.to_thread(
            self._runtime.ask, "inspect", "--type=container", "--format={{json .State}}", self._name
        )
        state = json.loads(asked.stdout) if asked.returncode == 0 else {}
        with self._launch.stderr.open("rb+") as errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - ERROR_CHARACTERS))
            said = _text_of(errors.read())
            if state.get("Status") not in ("exited", "stopped") or state.get("ExitCode") != code:
                raise ServiceError(
                    f"{self._runtime.program} failed with exit code {code}, and not the program in the container "
                    f"({state.get('Status') or _text_of(asked.stderr)}); its stderr ends with: {said}"
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
        relay = [] if self._network == "host" else ["python3", "-I", "-S", "-c", _RELAY, str(PORT), SOCKET]
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
        asked = self.ask("info", "--format={{json .}}")
        info = json.loads(asked.stdout) if asked.returncode == 0 else {}
        if not info or info.get("ServerErrors"):
            said = _text_of(asked.stderr) or "; ".join(info.get("ServerErrors") or [f"exit code {asked.returncode}"])
            raise ServiceError(
                f"environment.sandbox: {self.program} on {platform.node()} can't run containers ({said}): start "
                "its daemon, and let this user ask it, as members of the group docker may"
            )
        podman = info.get("host", {}).get("security", {}).get("rootless", False)
        is_rootless = podman or "name=rootless" in (info.get("SecurityOptions") or [])
        return "0:0" if is_rootless else f"{os.getuid()}:{os.getgid()}"

    def check(self, image: str) -> None:
        """Check that containers of an image can be run on this machine.

        Raises:
            ConfigError: There is no such program, or no such image.
            ServiceError: The daemon doesn't answer.
        """
        if shutil.which(self.program) is None:
            raise ConfigError(
                f"environment.sandbox.program: there is no program {self.program!r} on {platform.node()}; install "
                "Docker or Podman there, or name the path of its command"
            )
        self.find_user()
        asked = self.ask("image", "inspect", "--format={{.Id}}", image)
        if asked.returncode != 0:
            raise ConfigError(
                f"environment.sandbox.image: there is no image {image!r} on {platform.node()} "
                f"({_text_of(asked.stderr)}); Sluice pulls none: {self.program} pull {image}, or build it there"
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
        said = _text_of(asked.stderr)
        is_gone = "no such container" in said.lower() or "already in progress" in said
        if asked.returncode != 0 and not is_gone:
            raise ServiceError(
                f"{self.program} rm --force {' '.join(containers)}: {said}; it is tried again at a start"
            )

    def _remove_left(self) -> None:
        found = self.ask("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}").stdout.decode().split()
        if found:
            shown = f'--format={{{{.Id}}}} {{{{index .Config.Labels "{LABEL}"}}}}'
            lines = self.ask("inspect", "--type=container", shown, *found).stdout.decode().splitlines()
            left = [name for name, _, owner in (line.partition(" ") for line in lines) if not _is_in_use(owner)]
            if left:
                self.remove(left)


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


def check_sandbox(settings: Mapping[str, Any], command: Sequence[str]) -> None:
    """Check that this machine can start a program; a user's class shows that when it does.

    Raises:
        ConfigError: There is no such program or image, or no network of its own.
        ServiceError: There is no daemon that runs containers.
    """
    if settings["kind"] == "container":
        runtime(settings["program"]).check(settings["image"])
    elif settings["kind"] == "process":
        if shutil.which(program := resolve(command)[0]) is None:
            raise ConfigError(
                f"environment.command: there is no program {program!r} on {platform.node()}; name one on PATH, or a "
                "path from the run's working directory, of a file that may be executed"
            )
        tried = [sys.executable, "-I", "-S", "-c", _LOOPBACK]
        if settings["network"] != "host" and (ended := subprocess.run(tried, stderr=subprocess.PIPE)).returncode != 0:
            raise ConfigError(
                f'environment.sandbox.network = "none" on {platform.node()}: {_text_of(ended.stderr)}; let users make '
                "namespaces there (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or "
                'set environment.sandbox.kind = "container"'
            )


def resolve(command: Sequence[str]) -> list[str]:
    """Return a command whose placeholders are replaced, and whose program is a path or a name on PATH."""
    places = {"{workdir}": os.getcwd(), "{python}": sys.executable}
    resolved = [functools.reduce(lambda text, name: text.replace(name, places[name]), places, part) for part in command]
    program = os.path.abspath(resolved[0]) if os.path.dirname(resolved[0]) else resolved[0]
    return [program, *resolved[1:]]


def _spawn(
    command: Sequence[str], launch: Launch, limits: Sequence[int], variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one, in a session of its own; its standard input is the lifeline.

    Args:
        command: What it runs.
        launch: Has its folder, input and outputs.
        limits: Of its address space, a file's size, and the number of open files.
        variables: All of its environment variables.
    """
    with tempfile.TemporaryFile() as task, launch.stdout.open("wb") as output, launch.stderr.open("wb") as errors:
        task.write(launch.task)
        task.seek(0)
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, lifeline.__file__, str(task.fileno())]
        return subprocess.Popen(
            [*launcher, *map(str, limits), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            cwd=launch.home,
            env=dict(variables),
            pass_fds=(task.fileno(),),
            start_new_session=True,
        )


async def _end_of(process: "subprocess.Popen[bytes]") -> None:
    """Wait until a process has ended, without reaping it."""
    if process.returncode is not None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@functools.cache
def programs_folder() -> str:
    """Return the folder of this process's programs, and remove those that processes have left which were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _lock(str(left), fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(left)
    while True:
        root = tempfile.mkdtemp(prefix=_PREFIX)
        _lock(root, fcntl.LOCK_EX)
        if os.path.exists(root):  # no other process has removed it before it was locked
            return root


def remove_folder(folder: Path) -> None:
    """Remove a program's folder, whatever it has made read-only in it."""
    for place, names, _ in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            with suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: str) -> bool:
    """Return whether the process of a folder of programs runs; another user's can't be told, and is said to.

    One that isn't there is nobody's: folders are mounted by their paths, so all who start containers here see the same.
    """
    try:
        os.close(_lock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return False


def _lock(folder: str, operation: int) -> int:
    """Lock a folder until this process ends, when the kernel unlocks it, or the returned descriptor is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _text_of(output: bytes) -> str:
    """Return the end of an output in one line."""
    return " ".join(output.decode(errors="replace").split())[-ERROR_CHARACTERS:]
