"""How sandboxes start programs: their limits, the relay to the model's endpoint, and the folders that they have.

Without a network, a program asks the model at a port of a loopback interface of its own. A small relay, which is
started before it, passes that on to the Unix socket of the endpoint, which a container has mounted.
"""

import asyncio
import fcntl
import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.processes import lifeline
from infra.processes.isolated import kill_marked
from rl_core.environments.base import Launch
from schemas.errors import ConfigError

PORT = 8411  # of the relay
RELAYED = f"http://127.0.0.1:{PORT}"
ERROR_CHARACTERS = 600
MAX_ARGUMENT_BYTES = 2**17 - 1  # of the kernel's, MAX_ARG_STRLEN
FOLDERS = "sluice-programs"  # how those of all processes begin
_PLACE = re.compile(r"\{(workdir|python|info\.([^{}]+))\}")
_PREFIX = f"{FOLDERS}-{os.getuid()}-"
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
LOOPBACK = """
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
RELAY = """
import os, signal, socket, sys, threading, time
port, (folder, name) = int(sys.argv[1]), os.path.split(sys.argv[2])
command = sys.argv[3:]
path = f"/proc/self/fd/{os.open(folder, os.O_PATH)}/{name}"  # the whole one may be longer than a socket's address
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
# Ignored before the fork: the program may send them to its group before the relay has run.
numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
child = os.fork()
if child == 0:
    if os.fork():
        os._exit(0)
    threading.stack_size(2**18)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    while True:
        try:
            threading.Thread(target=relay, args=(listener.accept()[0],), daemon=True).start()
        except (OSError, RuntimeError):  # too many open files, or threads
            time.sleep(0.1)
os.waitpid(child, 0)
for number, handler in handlers.items():
    signal.signal(number, handler)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(command[0] + " can't be started: " + str(error.strerror))
"""


def fill(command: Sequence[str], info: Mapping[str, Any]) -> list[str]:
    """Return a command whose placeholders are replaced; each part stays one argument, whatever is put into it.

    Args:
        command: As in the config.
        info: The data row's: texts as they are, other values as JSON. None stands for no value.

    Raises:
        ConfigError: The row has no value of a name, or one that an argument can't have.
    """
    places = {"workdir": os.getcwd(), "python": sys.executable}

    def value_of(place: re.Match[str]) -> str:
        if (name := place[2]) is None:
            return places[place[1]]
        if (value := info.get(name)) is None:
            known = ", ".join(sorted(str(name) for name, value in info.items() if value is not None)) or "nothing"
            raise ConfigError(
                f"environment.command has {place[0]}, but the info of the data row (its extra_info and data_source) "
                f"has {known}; name one of these, or add {name!r} to the extra_info of all rows"
            )
        return value if isinstance(value, str) else json.dumps(value)

    filled = [_PLACE.sub(value_of, part) for part in command]
    for part, argument in zip(command, filled, strict=True):
        size = len(argument.encode(errors="surrogatepass"))
        if size > MAX_ARGUMENT_BYTES or "\0" in argument:
            what = f"more than {MAX_ARGUMENT_BYTES:,}" if size > MAX_ARGUMENT_BYTES else "one of them 0"
            raise ConfigError(
                f"environment.command: with the values of the data row, the argument {part!r:.200} has {size:,} bytes, "
                f"{what}; let the program take them from the JSON on its standard input, which has them under info"
            )
    return filled


def locate(command: Sequence[str]) -> list[str]:
    """Return a command without placeholders whose program is an absolute path, or a name on PATH."""
    program, *arguments = command
    return [os.path.abspath(program) if os.path.dirname(program) else program, *arguments]


def spawn(
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


async def end_of(process: "subprocess.Popen[bytes]") -> None:
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
    """Return the folder of this process's programs, and remove what processes have left which were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _lock(str(left), fcntl.LOCK_EX | fcntl.LOCK_NB)
            kill_marked(f"HOME={left}/")  # what its programs have started in sessions of their own
            remove_folder(left)
    while True:
        root = tempfile.mkdtemp(prefix=_PREFIX)
        _lock(root, fcntl.LOCK_EX)
        if os.path.exists(root):  # no other process has removed it before it was locked
            return root


def close_off(folder: Path) -> None:
    """Remove from a container's folder what would lead its grader elsewhere, or stop it: links out of it, and pipes."""
    own = os.path.realpath(folder)
    for place, names, files in os.walk(folder):
        for path in (os.path.join(place, name) for name in (*names, *files)):
            mode = os.lstat(path).st_mode
            is_inside = stat.S_ISLNK(mode) and os.path.realpath(path).startswith(f"{own}/")
            if not (is_inside or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                os.unlink(path)


def remove_folder(folder: Path) -> None:
    """Remove a program's folder, whatever it has made read-only in it."""
    for place, names, _ in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            with suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def is_in_use(folder: str) -> bool:
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


def text_of(output: bytes) -> str:
    """Return the end of an output in one line."""
    return " ".join(output.decode(errors="replace").split())[-ERROR_CHARACTERS:]
