"""Environment variables that libraries read when they are imported: set in all processes of Sluice; a user's own win.

Importing `infra` sets them before anything can import torch or Ray. Child processes inherit them, and so do the workers
of a Ray that is started here; those of a cluster that is there already set them when they import `infra` themselves.
Tests and benchmarks call the same function, so that they run as a user's run does.
"""

import os
from collections.abc import Mapping

TORCH_VARIABLES = {
    # OpenMP's threads otherwise wait for one another by spinning, GNU's for 3 ms: on cores that other processes use,
    # too, a step of a small model then takes several times as long. Without any spinning, each of its many small
    # operations waits until a thread wakes up: on cores of its own, a step takes twice as long. This is about 30 us.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "3000",
}

RAY_VARIABLES = {
    # Ray 2.60 heads require a token, and a driver sends one only if this is set.
    "RAY_AUTH_MODE": "token",
    # A Ray head that listens on loopback is otherwise looked for at this machine's address in its network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

LOCAL_RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray otherwise starts a process per core for each driver in advance. Actors with an environment of their own, such
    # as a run's, use none of them.
    "RAY_prestart_worker_first_driver": "0",
    # Ray otherwise gives its workers a niceness of 15: any other program of the same session or control group then gets
    # thirty times as much of a core as they.
    "RAY_worker_niceness": "0",
    # Between two looks at what each process uses: as often as Prometheus asks (docs/monitoring.md); Ray's own interval
    # is 2.5 s.
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
}


LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


def set_variables(variables: Mapping[str, str]) -> None:
    """Set those of the variables that aren't set in this process; no spin count if the user has another wait policy."""
    policy = TORCH_VARIABLES["OMP_WAIT_POLICY"]
    has_own_policy = os.environ.get("OMP_WAIT_POLICY", policy) != policy
    for name, value in variables.items():
        if not (name == "GOMP_SPINCOUNT" and has_own_policy):
            os.environ.setdefault(name, value)


def reach_loopback_directly() -> None:
    """Have no proxy of the user's between processes of this machine: local services would be asked for through it."""
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [*filter(None, own.split(",")), *(host for host in LOOPBACK_HOSTS if host not in own.split(","))]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)  # libraries read the one or the other


def chosen_variables() -> dict[str, str]:
    """Return those of `TORCH_VARIABLES` that the user has set to another value: a run's workers get them, too."""
    return {name: os.environ[name] for name, value in TORCH_VARIABLES.items() if os.environ.get(name, value) != value}
