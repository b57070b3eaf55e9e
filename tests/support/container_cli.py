"""A stand-in for Docker's command line: `container_cli.py STATE ARGUMENT ...`; it is no test of a real daemon.

It takes the commands that Sluice gives, with options that Docker has, and starts real processes: in network and process
namespaces of their own, but with this machine's files, so that a mount's target stands for its source; of the folder
that has all that is mounted, it has nothing else. A container is the child of a process that stands for the daemon: it
outlives the client that has asked for it. Files in the folder STATE set what there is: `images`, a name per line;
`path`, their PATH; `down`: the daemon has ended; `rootless`; `podman`.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

FLAGS = {"init", "interactive", "rm", "read-only", "privileged"}
VALUES = {
    *(
        "add-host",
        "cap-add",
        "cap-drop",
        "cpus",
        "device",
        "entrypoint",
        "env",
        "env-file",
        "gpus",
        "hostname",
        "label",
    ),
    *("log-driver", "memory", "memory-swap", "mount", "name", "network", "pids-limit", "pull", "security-opt"),
    *("shm-size", "tmpfs", "ulimit", "user", "userns", "volume", "workdir"),
}
OTHERS = {  # of other commands: flags, and options with values
    "inspect": (set(), {"type", "format"}),
    "image": (set(), {"format"}),
    "info": (set(), {"format"}),
    "ps": ({"all", "quiet", "no-trunc"}, {"filter"}),
    "rm": ({"force", "volumes"}, set()),
}
NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
STATE = Path(sys.argv[1]) if __name__ == "__main__" else Path()


def fail(message, code=1):
    print(message, file=sys.stderr)
    sys.exit(code)


def parse(arguments, flags, values, code=1):
    """Return the options by name, and what follows them."""
    options, rest = {}, list(arguments)
    while rest and rest[0].startswith("-"):
        name, given, value = rest.pop(0).removeprefix("--").partition("=")
        if name in flags:
            options[name] = True
        elif name in values:
            options.setdefault(name, []).append(value if given else rest.pop(0))
        else:
            fail(f"unknown flag: --{name}", code)
    return options, rest


def save(record):
    new = STATE / f"{record['id']}.new"
    new.write_text(json.dumps(record))
    new.replace(STATE / f"{record['id']}.json")


def records(state=STATE):
    found = []
    for path in sorted(state.glob("*.json")):
        with suppress(FileNotFoundError):
            found.append(json.loads(path.read_text()))
    return found


def find(name):
    return next((each for each in records() if name in (each["id"], each["name"])), None)


def run(arguments):
    options, (image, *command) = parse(arguments, FLAGS, VALUES, 125)
    if (STATE / "down").exists():
        fail(f"docker: {NO_DAEMON}", 125)
    if image not in (STATE / "images").read_text().split():
        assert options["pull"] == ["never"], "an image would be pulled"
        fail(f"docker: Error response from daemon: No such image: {image}", 125)
    (name,) = options["name"]
    if find(name):
        fail(f'docker: Error response from daemon: Conflict. The container name "/{name}" is already in use', 125)
    mounts = [dict(part.split("=") for part in mount.split(",")) for mount in options.get("mount", [])]
    for mount in mounts:
        assert mount["type"] == "bind"
        if not os.path.exists(mount["source"]):
            fail("docker: Error response from daemon: invalid mount config for type bind: no such path", 125)

    def outside(text):
        for mount in mounts:
            text = text.replace(mount["target"], mount["source"])
        return text

    lines = [line for path in options.get("env-file", []) for line in Path(path).read_text().splitlines()]
    given = dict(line.split("=", 1) for line in [*lines, *options.get("env", [])])
    variables = {"PATH": (STATE / "path").read_text(), **{name: outside(value) for name, value in given.items()}}
    labels = dict(label.partition("=")[::2] for label in options.get("label", []))
    state = {"Status": "created", "ExitCode": 0, "OOMKilled": False}
    record = {"id": uuid.uuid4().hex * 2, "name": name, "labels": labels, "options": options, "State": state, "pid": 0}
    save(record)
    process = [outside(part) for part in [*options["entrypoint"], *command]]
    if os.fork() == 0:
        os.setsid()
        supervise(record, process, outside(options["workdir"][-1]), variables, options)
        os._exit(0)
    while (found := find(name)) is None or found["State"]["Status"] != "exited":
        if (STATE / "down").exists():
            fail("error waiting for container: unexpected EOF", 125)
        time.sleep(0.02)
    sys.exit(found["State"]["ExitCode"])


def supervise(record, command, folder, variables, options):
    """Run a container's processes to their end."""
    own = [] if os.getuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    own += ["--net"] if options["network"] == ["none"] else []
    sources = [part.partition("source=")[2].split(",")[0] for part in options.get("mount", [])]
    init = [sys.executable, __file__, str(STATE), "init", str(int("--net" in own)), json.dumps(sources), *command]
    process = subprocess.Popen(
        [shutil.which("unshare"), *own, "--mount", "--pid", "--fork", "--kill-child", *init],
        cwd=folder,
        env=variables,
        start_new_session=True,
    )
    if find(record["id"]) is None:  # it has been removed meanwhile
        process.kill()
        return
    record["pid"] = process.pid
    record["State"]["Status"] = "running"
    save(record)
    while process.poll() is None:
        if resident_bytes(process.pid) > int(options["memory"][-1]):
            record["State"]["OOMKilled"] = True
            process.kill()
        time.sleep(0.02)
    code = process.returncode
    record["State"] |= {"Status": "exited", "ExitCode": 128 - code if code < 0 else code}
    if (STATE / f"{record['id']}.json").exists():
        save(record)


def resident_bytes(pid):
    """Return the memory of a process and of those that it has started."""
    total, pids = 0, [pid]
    while pids:
        with suppress(OSError, IndexError):
            folder = Path(f"/proc/{pids.pop()}")
            total += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            pids += [int(child) for path in folder.glob("task/*/children") for child in path.read_text().split()]
    return total


def mount(source, target, kind, flags):
    libc = ctypes.CDLL(None, use_errno=True)  # the program `mount` would take a descriptor's path for the one it had
    if libc.mount(source.encode(), target.encode(), kind, flags, None):
        raise OSError(ctypes.get_errno(), f"{target} can't be mounted")


def hide(sources):
    """Leave of the folder that has all of these files and folders only them."""
    found, own = {source: os.open(source, os.O_PATH) for source in sources}, os.getcwd()
    mount("none", os.path.commonpath(sources), b"tmpfs", 0)
    for source, descriptor in found.items():
        path = Path(f"/proc/self/fd/{descriptor}")
        Path(source).parent.mkdir(parents=True, exist_ok=True)
        Path(source).mkdir() if path.is_dir() else Path(source).touch()
        mount(str(path), source, None, 4096)  # MS_BIND
        os.close(descriptor)
    os.chdir(own)


def init(has_own_network, sources, *command):
    """Run a command as the first process of a container."""
    hide(json.loads(sources))
    if has_own_network == "1":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        fail(f"[FATAL tini (7)] exec {command[0]} failed: {error.strerror}", 127)
    while True:  # the parent of those whose own has ended
        pid, status = os.wait()
        if pid == process.pid:
            code = os.waitstatus_to_exitcode(status)
            sys.exit(128 - code if code < 0 else code)


def ask(command, arguments):
    options, names = parse(arguments[1:] if command == "image" else arguments, *OTHERS[command])
    if (STATE / "down").exists():
        fail(NO_DAEMON)
    if command == "info":
        rootless = (STATE / "rootless").exists()
        limits = {"MemoryLimit": not (STATE / "unlimited").exists(), "PidsLimit": True}
        docker = {
            **limits,
            "ID": "a",
            "SecurityOptions": ["name=seccomp,profile=builtin", *["name=rootless"] * rootless],
        }
        podman = {"host": {"security": {"rootless": rootless}}}
        print(json.dumps(podman if (STATE / "podman").exists() else docker))
    elif command == "image":
        assert arguments[0] == "inspect"
        if names[0] not in (STATE / "images").read_text().split():
            fail(f"Error response from daemon: No such image: {names[0]}")
    elif command == "ps":
        for each in records():
            (label,) = options["filter"]
            key, has_value, value = label.removeprefix("label=").partition("=")
            if key in each["labels"] and (not has_value or each["labels"][key] == value):
                print(each["id"])
    elif command == "inspect":
        missing = [name for name in names if find(name) is None]
        for each in filter(None, map(find, names)):
            label = each["labels"].get("sluice-programs")
            print(json.dumps(each["State"]) if "json" in options["format"][0] else f"{each['id']} {label}")
        if missing:
            fail(f"Error response from daemon: No such container: {missing[0]}")
    else:
        for each in filter(None, map(find, names)):
            (STATE / f"{each['id']}.json").unlink(missing_ok=True)
            if each["State"]["Status"] == "running":
                with suppress(ProcessLookupError):
                    while True:  # until the one that has started it knows
                        os.kill(each["pid"], signal.SIGKILL)
                        time.sleep(0.01)
        print(*[name for name in names if find(name) is None])


if __name__ == "__main__":
    _, _, command, *arguments = sys.argv
    if command != "init":
        with (STATE / "log").open("a") as log:
            log.write(json.dumps([command, *arguments]) + "\n")
    {"run": run, "init": lambda all: init(*all)}.get(command, lambda all: ask(command, all))(arguments)
