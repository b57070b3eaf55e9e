"""Ray actors: created, found and killed by name, and called so that errors keep their types."""

import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from infra.ray.tracing import trace_arguments
from infra.ray.worker_logs import log_lines_of, open_reply
from schemas.errors import (
    GpuMemoryError,
    PipelineError,
    RayLostError,
    WorkerFailedError,
    WorkerLostError,
    describe,
    gpu_bytes_in,
    is_out_of_memory,
)

NAMESPACE = "sluice"
KILL_TIMEOUT_SECONDS = 20
RESPONSE_SECONDS = 10  # of Ray's head, to a connection


def require_ray() -> None:
    """Check that the Ray cluster that this process is connected to still responds.

    Without the check, a request of Ray's waits for a minute, and then Ray ends this process.

    Raises:
        RayLostError: It doesn't.
    """
    import ray

    if not ray.is_initialized():
        raise RayLostError("this process isn't connected to Ray")
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=RESPONSE_SECONDS).close()
    except OSError as error:
        raise RayLostError(f"Ray at {address} is gone, with all workers ({error})") from None


def find_actor(name: str) -> Any | None:
    """Return the named actor's handle, or None if there is no such actor; for several, see `find_actors`.

    Raises:
        RayLostError: Ray is gone.
    """
    return find_actors([name]).get(name)


def find_actors(names: Iterable[str]) -> dict[str, Any]:
    """Return the handles of those of the named actors that exist, by name, in the order of the names.

    Raises:
        RayLostError: Ray is gone.
    """
    import ray

    require_ray()  # once: it takes longer than to find an actor
    found = {}
    for name in names:
        with suppress(ValueError):  # there is no such actor
            found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def actor_name() -> str:
    """Return the name of the actor in whose process this is called; empty if it has none."""
    import ray

    if not ray.is_initialized():  # asked for its context, Ray would start a cluster of its own
        return ""
    return str(ray.get_runtime_context().get_actor_name() or "")


def create_actor(name: str, actor_class: type, *args: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Create a named actor and return its handle; if one of that name exists, return that one's.

    The actor is detached: a killed driver leaves it behind, and the next driver finds it with its state. Ray never
    restarts it.

    Args:
        name: Unique in the cluster.
        actor_class: A plain class.
        *args: Its constructor's arguments.
        options: Further arguments of `ray.remote` for the class.
    """
    import ray

    actor: Any = ray.remote(**options)(actor_class) if options else ray.remote(actor_class)
    return actor.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
    ).remote(*args)


def kill_actors(names: Iterable[str]) -> None:
    """Kill the named actors that exist, all at once, and wait until their names are free again.

    Raises:
        WorkerLostError: One did not exit in time.
    """
    import ray

    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    alive = find_actors(names)
    while alive:
        if time.monotonic() > deadline:
            listed = ", ".join(alive)
            raise WorkerLostError(f"{listed} did not exit within {KILL_TIMEOUT_SECONDS} s after having been killed")
        for actor in alive.values():
            ray.kill(actor)
        time.sleep(0.05)
        alive = find_actors(alive)


async def call(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor and await its result; a worker's spans become children of the current one.

    Raises:
        PipelineError: The method raised it.
        GpuMemoryError: The GPU's memory is full.
        WorkerFailedError: The method raised another error that is not one of Sluice's own.
        WorkerLostError: The actor died.
    """
    return await resolve(getattr(actor, method).remote(*args, **trace_arguments()), method)


async def resolve(ref: Any, method: str) -> Any:
    """Await the object ref of a call of `method`; see `call`. What the worker has logged is logged here."""
    import ray

    try:
        return open_reply(await ref)
    except ray.exceptions.RayTaskError as error:
        log_lines_of(error.cause)
        if isinstance(error.cause, PipelineError):
            raise error.cause from None
        if isinstance(error.cause, ray.exceptions.RayError):  # of an argument, which another worker makes
            raise WorkerLostError(f"a worker died during {method!r}: {describe(error.cause)}") from error
        message = f"{method!r} of a worker failed: {describe(error.cause)}"
        if is_out_of_memory(error.cause):
            raise GpuMemoryError(message, gpu_bytes_in(error.cause)) from error
        raise WorkerFailedError(message) from error
    except ray.exceptions.RayError as error:
        raise WorkerLostError(f"a worker died during {method!r}: {' '.join(str(error).split())}") from None
