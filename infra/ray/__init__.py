"""Ray as Sluice uses it: the cluster, actors, groups of ranks and pools of workers. Ray is imported when it is used."""

from infra.ray.actors import call, create_actor
from infra.ray.cluster import connect
from infra.ray.group import WorkerGroup
from infra.ray.pool import WorkerPool

__all__ = ["WorkerGroup", "WorkerPool", "call", "connect", "create_actor"]
