"""Ray as Sluice uses it: the cluster, actors, groups of ranks and pools of workers. Ray is imported when it is used."""

from infra.ray.actors import call, create_actor
from infra.ray.cluster import connect
from infra.ray.pool import WorkerPool
from infra.ray.ranks import WorkerGroup

__all__ = ["WorkerGroup", "WorkerPool", "call", "connect", "create_actor"]
