"""Connecting a driver to a Ray cluster."""

import logging
import os
import signal
import socket

from infra.ray.actors import NAMESPACE
from infra.ray.module_path import worker_setup_hook
from schemas.errors import ServiceError

CONNECT_TIMEOUT_SECONDS = 10


def connect(address: str, *, local: bool) -> None:
    """Connect this process to Ray, once. Workers find modules in its working directory, after all others.

    Args:
        address: `host:port` of the Ray head.
        local: Whether Sluice started that Ray, on loopback.

    Raises:
        ServiceError: Nothing responds at `address`.
    """
    import ray

    if ray.is_initialized():
        return
    if local:
        _use_loopback_only()
    _check_reachable(address)
    # Nobody waits any more for what a failed or cancelled step has called: Ray would print the tracebacks of that.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray installs its own SIGTERM handler, but Prefect's must stay: it turns SIGTERM into a cancellation.
    handler = signal.getsignal(signal.SIGTERM)
    # The head may have been started with others.
    environment = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env={"env_vars": environment, "worker_process_setup_hook": worker_setup_hook()},
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServiceError(f"no Ray head responds at {address}: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def _use_loopback_only() -> None:
    """Bind this process's ports to loopback, as the head that `infra.services` starts does."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # read from RAY_ENVIRONMENT, but only when Ray is imported


def _check_reachable(address: str) -> None:
    # Ray itself would retry for minutes, and then exit the process.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"no Ray head responds at {address!r} ({error}); check runtime.ray_address (host:port), or leave it out to "
            "start a local one"
        ) from None
