"""Connecting a driver to a Ray cluster."""

import logging
import os
import signal
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from infra.ray.actors import NAMESPACE, require_ray
from infra.ray.module_path import worker_setup_hook
from infra.variables import chosen_variables
from schemas.errors import RayLostError, ServiceError

CONNECT_TIMEOUT_SECONDS = 10

_connected: list[str] = []  # the address of the cluster that `connect` has connected this process to


def connect(address: str, *, py_modules: Sequence[str] = (), secrets: Collection[str] = ()) -> None:
    """Connect this process to Ray, unless it is. Workers find modules in its working directory, after all others.

    Args:
        address: `host:port` of the Ray head, or `auto`: that of the cluster that this machine belongs to.
        py_modules: `services.py_modules`.
        secrets: Variables that Ray, which writes a job's environment to its logs, does not get.

    Raises:
        ServiceError: Nothing responds at `address`, it is one of Ray Client's, or Ray, Python or the token differ
            there; or the user's code has connected this process.
    """
    import ray

    if address.startswith("ray://"):
        raise ServiceError(
            f"{address} is of Ray Client, which was removed in 0.3: the driver runs on a node of the cluster; submit "
            "it as a job: ray job submit --address http://HEAD:8265 -- bash -c 'cd FOLDER && exec sluice train CONFIG "
            "services.ray_address=auto'"
        )
    if _is_connected(address):
        return
    if address != "auto":
        _check_reachable(address)
    # Nobody waits any more for what a failed or cancelled step has called: Ray would print the tracebacks of that.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray installs its own SIGTERM handler, but Prefect's must stay: it turns SIGTERM into a cancellation.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env=_runtime_env(py_modules, secrets),
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except (RuntimeError, ValueError) as error:
        raise ServiceError(f"can't connect to {address}: {' '.join(str(error).split())}") from None
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:  # with another token, Ray tells the first
        reason = str(error).partition(". ")[0].rstrip(".")
        raise ServiceError(
            f"can't connect to {address}: {reason}; if Ray runs there, set RAY_AUTH_MODE=token and the cluster's "
            "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) on each machine, or RAY_AUTH_MODE=disabled on all"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    _connected[:] = [address]


def disconnect() -> None:
    """Leave the cluster that `connect` has connected this process to, if there is one.

    A minute after a cluster is gone, Ray ends each process that is still connected to it.
    """
    import ray

    if _connected:
        ray.shutdown()
        _connected.clear()


def require_own() -> None:
    """Check that no other code has connected this process to Ray: workers there would lack what a run's are given.

    Raises:
        ServiceError: Some has.
    """
    import ray

    if ray.is_initialized() and not _connected:
        raise ServiceError(
            f"this process has connected itself to Ray at {ray.get_runtime_context().gcs_address}; call ray.shutdown() "
            "first, and set services.ray_address to use that cluster"
        )


def _is_connected(address: str) -> bool:
    """Return whether `connect` has connected this process to a cluster that still responds; leave any other one."""
    require_own()
    with suppress(RayLostError):  # also if it isn't connected at all
        require_ray()
        if _connected == [address]:
            return True
    disconnect()
    return False


def metrics_addresses() -> list[str]:
    """Return the addresses (`host:port`) at which the cluster's nodes serve their metrics."""
    import ray

    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def _runtime_env(py_modules: Sequence[str], secrets: Collection[str]) -> dict[str, Any]:
    """Return the environment of the run's workers."""
    # The head may have been started with others.
    variables = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")} | chosen_variables()
    variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    variables = {name: value for name, value in variables.items() if name not in secrets}
    modules = {"py_modules": list(py_modules)} if py_modules else {}
    return {"env_vars": variables, "worker_process_setup_hook": worker_setup_hook(), **modules}


def _check_reachable(address: str) -> None:
    # Ray itself would retry for minutes, and then exit the process.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"no Ray head responds at {address!r} ({error}); check services.ray_address (host:port, or auto), or leave "
            "it out to start a local one"
        ) from None
