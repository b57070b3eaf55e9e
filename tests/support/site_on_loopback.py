"""Several machines on this one, which nothing outside can reach: addresses on a loopback interface of their own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.services.processes import process_tree
from tests.support.deploy_files import DEPLOY, ROOT
from tests.support.progress import wait_until

NETWORK = "10.77.0."
SETUP = """
set -eu
ip link set lo up
for address in $ADDRESSES; do ip address add "$address/32" dev lo; done
mount --bind "$SITE/hosts" /etc/hosts
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
touch "$SITE/ready"
exec sleep infinity
"""


def run_with_shared_memory(size: str, command: Sequence[str]) -> str:
    """Run a command that has a `/dev/shm` of its own, of a size such as 4m; return what it printed."""
    namespace = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("namespaces are not permitted")
    setup = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
    ended = subprocess.run(
        [*namespace, "bash", "-c", setup, size, *command], check=True, capture_output=True, text=True
    )
    return ended.stdout


class Site:
    """Machines by name. Their processes share files, but have network, mounts and process ids of their own.

    Args:
        folder: The working directory of all commands, as the shared mount of the machines.
        machines: Their names; each gets an address.
    """

    def __init__(self, folder: Path, machines: Sequence[str]) -> None:
        self.folder, self._started = folder, list[subprocess.Popen[bytes]]()
        self.addresses = {name: f"{NETWORK}{number}" for number, name in enumerate(machines, 1)}
        own = folder / ".site"
        own.mkdir(parents=True)
        hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (own / "bin").mkdir()
        (own / "bin" / "driver").symlink_to(DEPLOY / "driver.sh")
        namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        environment = {**os.environ, "SITE": str(own), "ADDRESSES": " ".join(self.addresses.values())}
        self._holder = subprocess.Popen([*namespaces, "bash", "-c", SETUP], env=environment, stderr=subprocess.PIPE)
        wait_until(lambda: (own / "ready").exists() or self._holder.poll() is not None)
        if self._holder.poll() is not None:
            assert self._holder.stderr is not None
            pytest.skip(f"namespaces are not permitted: {self._holder.stderr.read().decode().strip()}")
        (self._first,) = psutil.Process(self._holder.pid).children()

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: str) -> "subprocess.Popen[bytes]":
        """Start a command; its output goes to the file `log` in the site's folder."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "OMP_NUM_THREADS") if name in os.environ}
        path = os.pathsep.join(
            [str(self.folder / ".site" / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "200"}
        enter = ["nsenter", f"--target={self._first.pid}", "--net", "--mount", "--pid", "--"]
        enter += ["bash", "-c", 'cd "$0" && exec "$@"', str(self.folder)]  # --wd would be a folder of the other mounts
        with (self.folder / log).open("wb") as file:
            process = subprocess.Popen(
                [*enter, *command], env=kept | own | dict(environment), stdout=file, stderr=subprocess.STDOUT
            )
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: str, exit_code: int = 0) -> str:
        """Run a command to its end; return what it printed."""
        process = self.start(command, environment, log)
        wait_until(lambda: process.poll() is not None)
        printed = (self.folder / log).read_text()
        assert process.returncode == exit_code, f"{' '.join(command)}: exit {process.returncode}\n{printed}"
        return printed

    def add_command(self, name: str, text: str) -> None:
        """Add a script that all commands find before any other command of its name."""
        path = self.folder / ".site" / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def processes(self) -> dict[psutil.Process, str]:
        """Return the living processes that the site's commands have left or started, and their command lines."""
        found: dict[psutil.Process, str] = {}
        for root in (self._first.pid, *(each.pid for each in self._started if each.poll() is None)):
            for process in process_tree(root)[1:]:
                with suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
                    found[process] = " ".join(process.cmdline())
        return found

    def close(self) -> None:
        """Kill all processes of the site: those of its process namespace end with its first."""
        self._holder.kill()
        for process in (self._holder, *self._started):
            process.wait()
        shutil.rmtree(self.folder / ".site")
