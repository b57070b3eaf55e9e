"""A driver outside the Ray cluster, which Ray Client connects: it is on none of the nodes."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from schemas.errors import PipelineError, RayLostError, describe

SCHEME = "ray://"

_server = ""  # host:port of the Ray Client server that this process is connected to; empty on a node of the cluster


def is_client_address(address: str) -> bool:
    """Return whether an address is that of a Ray Client server."""
    return address.startswith(SCHEME)


def connected_to(server: str) -> None:
    """Record that this process is connected through a Ray Client server."""
    global _server
    _server = server


def is_outside() -> bool:
    """Return whether this process is connected from outside the cluster."""
    return bool(_server)


def own_node() -> str | None:
    """Return Ray's id of this process's node; None if it is on none."""
    import ray

    return None if _server else ray.get_runtime_context().get_node_id()


def head_address() -> str:
    """Return host:port of what this process is connected to: Ray's head, or a Ray Client server on it."""
    import ray

    return _server or ray.get_runtime_context().gcs_address


@contextmanager
def lost_connection_raised() -> Iterator[None]:
    """Raise a RayLostError for what Ray Client raises in the block once it has lost its connection."""
    import ray

    try:
        yield
    except PipelineError:
        raise
    except Exception as error:  # a ConnectionError, or a plain Exception if it knew before
        if _server and (isinstance(error, ConnectionError) or not ray.is_initialized()):
            raise RayLostError(f"the connection to Ray at {_server} is lost ({describe(error)})") from None
        raise


async def value_of(ref: Any) -> Any:
    """Await an object ref; a cancelled wait leaves the future of Ray Client, which sets it later, as it is."""
    if not _server:
        return await ref
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def settle(done: "Future[Any]") -> None:
        if waiter.done():  # cancelled
            return
        if (error := done.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(done.result())

    def settle_in_loop(done: "Future[Any]") -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, done)

    ref.future().add_done_callback(settle_in_loop)
    return await waiter
