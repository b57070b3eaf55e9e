"""Connecting a driver to a Ray cluster."""

import logging
import os
import signal
import socket
import warnings
from collections.abc import Sequence
from typing import Any

from infra.ray.actors import NAMESPACE
from infra.ray.client import SCHEME, connected_to, is_client_address
from infra.ray.module_path import WORKING_DIRECTORY, worker_setup_hook
from infra.variables import chosen_variables
from schemas.errors import ServiceError

CONNECT_TIMEOUT_SECONDS = 10
CLIENT_ATTEMPTS = 4

_STAND_IN_DIED = "Starting Ray client server failed"

logger = logging.getLogger(__name__)


def connect(address: str, *, local: bool, py_modules: Sequence[str] = ()) -> None:
    """Connect this process to Ray, once. Workers find modules in its working directory, after all others.

    Args:
        address: `host:port` of the Ray head; `auto`: that of the cluster that this machine belongs to; or
            `ray://host:port` of a Ray Client server, for a machine outside the cluster.
        local: Whether Sluice started that Ray, on loopback.
        py_modules: `services.py_modules`.

    Raises:
        ServiceError: Nothing responds at `address`, or it is of another version of Ray or Python.
    """
    import ray

    if ray.is_initialized():
        return
    if local:
        _use_loopback_only()
    if address != "auto":
        _check_reachable(address)
    # Nobody waits any more for what a failed or cancelled step has called: Ray would print the tracebacks of that.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray installs its own SIGTERM handler, but Prefect's must stay: it turns SIGTERM into a cancellation.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _init(address, _runtime_env(address, py_modules))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _connection_error(address, error) from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    connected_to(address.removeprefix(SCHEME) if is_client_address(address) else "")


def metrics_addresses() -> list[str]:
    """Return the addresses (`host:port`) at which the cluster's nodes serve their metrics."""
    import ray

    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def _init(address: str, runtime_env: dict[str, Any], attempts: int = CLIENT_ATTEMPTS) -> None:
    import ray

    # The log of the driver's stand-in, which is in a file on the head, too; what fails there is raised here.
    logging.getLogger("ray.util.client.logsclient").disabled = True
    try:
        with warnings.catch_warnings():  # Ray Client also warns of what it raises
            warnings.filterwarnings("ignore", message="Ray Client connection timed out")
            ray.init(
                address=address,
                namespace=NAMESPACE,
                runtime_env=runtime_env,
                logging_level=logging.WARNING,
                log_to_driver=False,
            )
    except ConnectionError as error:
        # The head forks it from a process with gRPC threads, which may crash the child (ray-project/ray, issue 63202).
        if _STAND_IN_DIED not in str(error) or attempts == 1:
            raise
        logger.info("Ray could not start this driver's process on the head: trying again")
        _init(address, runtime_env, attempts - 1)


def _runtime_env(address: str, py_modules: Sequence[str]) -> dict[str, Any]:
    """Return the environment of the run's workers; through Ray Client, also of the driver's stand-in on the head."""
    # The head may have been started with others.
    variables = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")} | chosen_variables()
    variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    modules = {"py_modules": list(py_modules)} if py_modules else {}
    if is_client_address(address):
        # Without PYTHONSAFEPATH, the stand-in would first find modules in the folder where the head was started.
        return {"env_vars": {**variables, WORKING_DIRECTORY: os.getcwd(), "PYTHONSAFEPATH": "1"}, **modules}
    return {"env_vars": variables, "worker_process_setup_hook": worker_setup_hook(), **modules}


def _use_loopback_only() -> None:
    """Bind this process's ports to loopback, as the head that `infra.services` starts does."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # read from RAY_ENVIRONMENT, but only when Ray is imported


def _check_reachable(address: str) -> None:
    # Ray itself would retry for minutes, and then exit the process.
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        server = "Ray Client server" if is_client_address(address) else "Ray head"
        raise ServiceError(
            f"no {server} responds at {address!r} ({error}); check services.ray_address (host:port, auto, or "
            "ray://host:port), or leave it out to start a local one"
        ) from None


def _connection_error(address: str, error: Exception) -> ServiceError:
    message = " ".join(str(error).split())
    if is_client_address(address) and "timeout" in message:  # Ray Client says no more of a refused token, either
        message = (
            "what listens there is not a Ray Client server (`ray start --ray-client-server-port`), or refuses this "
            "driver's token (RAY_AUTH_MODE, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
        )
    return ServiceError(f"can't connect to {address}: {message}")
