"""`sluice ps` and `sluice stop`: the runs of a Ray cluster."""

import json
import os
import signal
import socket
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from infra.ray import cluster
from infra.services.local import LocalServices
from infra.storage.driver_lock import find_driver, is_driven
from infra.storage.identity import identity_of
from infra.storage.runs import RunDirectory
from infra.workers.cluster_runs import cluster_runs, end_run
from schemas.config.runtime import TimeoutsConfig
from schemas.errors import RunError
from schemas.placement import ClusterRun

DRIVER_SECONDS = 60  # for a driver to end after its notice; it has ten for its workers and its store


def print_cluster_runs(console: Console, address: str | None, services_dir: str, *, as_json: bool = False) -> None:
    """Print the runs of a cluster.

    Raises:
        ServiceError: No Ray head responds there.
    """
    runs = cluster_runs() if _connect(address, services_dir) else []
    if as_json:
        console.out(json.dumps([run.model_dump() for run in runs]), highlight=False)
    elif runs:
        console.print(_table(runs))
    else:
        console.print("no run has processes in the cluster")


def stop_run(console: Console, run: str, runs_dir: str, address: str | None, services_dir: str) -> None:
    """Stop a run's driver, and end what the run has in its cluster.

    Args:
        console: The console to print on.
        run: The run's id or directory; with an address, a run whose directory is elsewhere, too.
        runs_dir: The folder of the runs.
        address: The cluster; None: the run's own.
        services_dir: The folder of the local services' state.

    Raises:
        RunError: There is no such run, or its driver is on another machine, or does not end.
        ServiceError: No Ray head responds at the address.
    """
    try:
        directory = RunDirectory.open(run, runs_dir)
    except RunError:
        if address is None:
            raise
        run_id, identity, hint, had_driver = run, run, "", False
    else:
        had_driver = _stop_driver(console, directory)
        services = directory.config().services
        address, services_dir = address or services.ray_address, services.dir
        run_id, hint = directory.run_id, f"; resume with: sluice resume {directory.argument}"
        identity = identity_of(directory)
    ended = end_run(identity) if _connect(address, services_dir) else 0
    text = f"stopped {run_id}" if ended or had_driver else f"nothing of {run_id} is running"
    console.print(text + hint, markup=False, highlight=False, soft_wrap=True)


def _stop_driver(console: Console, directory: RunDirectory) -> bool:
    """Ask a run's driver to end, which frees what it holds, and wait for it; return whether there was one."""
    if (driver := find_driver(directory)) is None:
        return False
    if driver.host != socket.gethostname():
        raise RunError(
            f"run {directory.run_id} is driven by {driver}: stop it there, or cancel its flow run in the Prefect UI"
        )
    seconds = _notice_seconds(directory) + DRIVER_SECONDS
    with console.status(f"waiting for the driver, {driver}"):
        os.kill(driver.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while is_driven(directory):
            if time.monotonic() > deadline:
                raise RunError(
                    f"the driver of run {directory.run_id}, {driver}, did not end within {seconds:g} s; end it "
                    f"with: kill -9 {driver.pid}; then stop the run again"
                )
            time.sleep(0.2)
    return True


def _notice_seconds(directory: RunDirectory) -> float:
    """Return for how long a run's driver may go on after a SIGTERM; that it can't be read keeps none from ending."""
    try:
        return directory.config().timeouts.notice_seconds
    except RunError:
        return TimeoutsConfig().notice_seconds


def _connect(address: str | None, services_dir: str) -> bool:
    """Connect to a cluster, or to the local Ray; return whether there is one."""
    address = address or LocalServices(Path(services_dir)).ray_address
    if address is None:
        return False
    cluster.connect(address)
    return True


def _table(runs: list[ClusterRun]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "state", "processes", "GPUs", "memory", "age", "nodes", "owner"):
        table.add_column(name, justify="right" if name in ("processes", "GPUs", "memory", "age") else "left")
    ids = Counter(run.run_id for run in runs)
    for run in runs:
        name = run.run_id if ids[run.run_id] == 1 else run.identity
        state: str = run.state
        if state == "no driver" and run.driverless_seconds is not None:
            state = f"no driver for {_duration(run.driverless_seconds)}"
        age = _duration(run.age_seconds) if run.age_seconds is not None else "-"
        figures = str(run.num_processes), str(run.num_gpus), f"{run.memory_bytes / 2**20:,.0f} MiB", age
        table.add_row(name, state, *figures, ", ".join(run.nodes), run.owner)
    return table


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
