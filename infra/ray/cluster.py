"""Connecting a driver to a Ray cluster."""

import logging
import os
import signal
import socket

from infra.ray.actors import NAMESPACE
from schemas.errors import ServiceError

CONNECT_TIMEOUT_SECONDS = 10


def connect(address: str, *, local: bool) -> None:
    """Connect this process to Ray, once.

    Args:
        address: `host:port` of the Ray head.
        local: Whether Sluice started that Ray, on loopback.

    Raises:
        ServiceError: Nothing answers at `address`.
    """
    import ray

    if ray.is_initialized():
        return
    if local:
        _use_loopback_only()
    _require_answer(address)
    # Ray installs its own SIGTERM handler; Prefect's turns SIGTERM into a cancellation and must stay.
    handler = signal.getsignal(signal.SIGTERM)
    environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env={"env_vars": environment},
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServiceError(f"no Ray answers at {address}: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def _use_loopback_only() -> None:
    """Bind this process's ports to loopback, as the head that `infra.services` starts does."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # read from RAY_ENVIRONMENT, but only when Ray is imported


def _require_answer(address: str) -> None:
    # Ray itself would try for minutes, and then exit the process.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"no Ray answers at {address!r} ({error}); check runtime.ray_address (host:port), or leave it out to "
            "start a local one"
        ) from None
