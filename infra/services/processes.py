"""Processes and all that they have started."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

STOP_TIMEOUT_SECONDS = 5  # after which processes are killed; they have nothing to save


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started; nothing if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def process_start(pid: int) -> str | None:
    """Return a boot's id and the clock ticks from it to a process's start, which nobody sets; None if it is gone.

    It tells a process from a later one with the same pid, also after a reboot: psutil's `create_time` is a time of
    day, which moves when the system's clock is set.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may have spaces
    except OSError:
        return None
    return f"{boot}/{fields[19]}"


def process_name(process: psutil.Process) -> str:
    """Return a process's name; empty if it is gone."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def listens(pid: int, port: int) -> bool:
    """Return whether the process or one of its children listens at a port."""
    try:
        connections = [found for process in process_tree(pid) for found in process.net_connections("tcp")]
    except psutil.NoSuchProcess:
        return False
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in connections)


def stop_process_tree(pid: int) -> None:
    """Terminate a process and all that it has started; kill what is left after a while.

    If it leads a session, or did, all processes of that are included: some may have lost their parent.
    """
    processes = list({process.pid: process for process in [*process_tree(pid), *_session(pid)]}.values())
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _session(pid: int) -> list[psutil.Process]:
    """Return the processes of the session that a process leads or led."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended
            if os.getsid(process.pid) == pid:
                found.append(process)
    return found
