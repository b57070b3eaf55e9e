"""Ports of services on loopback."""

import random
import socket

LOOPBACK = "127.0.0.1"
# Below Linux's ephemeral ports, from which any connection takes one, and above Ray's default range of workers' ports.
SERVICE_PORTS = range(20_000, 32_768)


def is_free(port: int) -> bool:
    """Return whether nothing listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) != 0


def free_port() -> int:
    """Return a port for a service that will bind it some seconds later, when another process must not have taken it.

    The kernel's own choice (port 0) may be given to the next process that asks, or to any connection.
    """
    while True:
        port = random.SystemRandom().choice(SERVICE_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
