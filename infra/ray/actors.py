"""Ray actors: created, found and killed by name, and called so that errors keep their types."""

import time
from collections.abc import Mapping
from typing import Any

from schemas.errors import PipelineError, WorkerLostError

NAMESPACE = "sluice"
KILL_TIMEOUT_SECONDS = 20


def find_actor(name: str) -> Any | None:
    """Return the named actor's handle, or None if there is no such actor."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def create_actor(
    name: str, actor_class: type, *args: Any, num_gpus: float = 0, options: Mapping[str, Any] | None = None
) -> Any:
    """Create a named actor and return its handle; if one of that name exists, return that one's.

    The actor is detached: a killed driver leaves it behind, and the next driver finds it with its state. Ray never
    restarts it.

    Args:
        name: Unique in the cluster.
        actor_class: A plain class.
        *args: Its constructor's arguments.
        num_gpus: GPUs, or a fraction of one, that Ray assigns to it.
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
        num_gpus=num_gpus,
        max_restarts=0,
        max_task_retries=0,
    ).remote(*args)


def start_actor(actor_class: type, *args: Any) -> Any:
    """Start an actor without a name: it is killed when its handle is dropped, or when its driver exits."""
    import ray

    return ray.remote(actor_class).options(num_cpus=0, max_restarts=0).remote(*args)


def kill_actor(name: str) -> None:
    """Kill the named actor, if it exists, and wait until its name is free again.

    Raises:
        WorkerLostError: It did not exit in time.
    """
    import ray

    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if (actor := find_actor(name)) is None:
            return
        ray.kill(actor)
        time.sleep(0.05)
    raise WorkerLostError(f"worker {name} did not exit within {KILL_TIMEOUT_SECONDS} s after it was killed")


async def call(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor and await its result.

    Raises:
        PipelineError: The method raised it.
        WorkerLostError: The actor died.
    """
    return await resolve(getattr(actor, method).remote(*args), method)


async def resolve(ref: Any, method: str) -> Any:
    """Await the object ref of a call of `method`; see `call`."""
    import ray

    try:
        return await ref
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PipelineError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise WorkerLostError(f"a worker died during {method!r}: {error}") from None
