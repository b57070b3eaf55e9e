"""Finding or starting the index of a run's shared columns."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.ray.actors import create_actor, find_actor, kill_actors
from infra.ray.client import own_node
from infra.ray.health import ACTOR_OPTIONS
from infra.storage.shared_memory import choose_root
from infra.stores.chunk_errors import lost_store_error
from infra.stores.column_server import Limits
from infra.stores.flight import read_tls
from infra.stores.shared import Membership, SharedColumnStore
from infra.stores.shared_index import StoreIndex
from schemas.errors import WorkerLostError


def index_name(identity: str) -> str:
    """Return the name under which every process of the cluster finds the index of the run with that identity."""
    return f"sluice/{identity}/store"


def find_shared_store(run_id: str, identity: str | None = None) -> SharedColumnStore:
    """Return a client of a run's store.

    Args:
        run_id: The run whose columns these are.
        identity: What its index is named by; None: the run's id.

    Raises:
        WorkerLostError: It has no living index.
    """
    _require_ray(run_id)
    if (index := find_actor(index_name(identity or run_id))) is None:
        raise WorkerLostError(f"run {run_id} has no column store in this Ray cluster")
    return _open(run_id, index)


def start_shared_store(
    run_id: str,
    limits: Limits,
    *,
    identity: str | None = None,
    incarnation: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SharedColumnStore:
    """Start the index of a run's store, and return a client; one that is left, but lost, is killed.

    The index runs on this node, or on that of the Ray Client server if this process is outside the cluster.

    The index is detached, so it outlives the driver. It is never restarted: a new one is a new incarnation of the
    store, unless a durable tier names the incarnation.

    Args:
        run_id: The run whose columns these are.
        limits: Its settings.
        identity: What the index is named by; None: the run's id.
        incarnation: The name of its incarnation; None makes a new one.
        clock: Returns the time in seconds, by which leases expire; called in the index's process.

    Raises:
        WorkerLostError: This process isn't connected to Ray, or the index dies.
        ConfigError: The folder or the certificate in the settings can't be used.
    """
    _require_ray(run_id)
    if own_node() is not None:  # as the index does on the same node: its errors and warnings are seen here
        choose_root(limits.shared_memory, limits.capacity_bytes)
        if limits.tls:
            read_tls(limits.tls)
    name = index_name(identity or run_id)
    kill_actors([name])  # it may be stopped, and would never answer
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"scheduling_strategy": here, **ACTOR_OPTIONS}
    index = create_actor(name, StoreIndex, run_id, limits, incarnation, clock, options=options)
    return _open(run_id, index)


def _require_ray(run_id: str) -> None:
    if not ray.is_initialized():  # otherwise Ray itself would search for a cluster, for minutes
        raise WorkerLostError(f"the column store of run {run_id} can't be reached: this process isn't connected to Ray")


def _open(run_id: str, index: Any) -> SharedColumnStore:
    return SharedColumnStore(run_id, partial(join, run_id, index, own_node()), partial(ray.kill, index))


def join(run_id: str, index: Any, node: str | None) -> Membership:
    """Return the membership of a client on a node; None: on no node of the cluster.

    Raises:
        WorkerLostError: The index is gone.
    """
    try:
        return Membership(*index.join.remote(node).future().result())
    except RayActorError as error:
        raise lost_store_error(run_id, error) from None
