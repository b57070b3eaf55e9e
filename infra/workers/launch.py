"""The run's workers by role: class, number and GPU fraction; find, create and kill them."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from infra.ray import health
from infra.ray.actors import call, create_actor, find_actor, kill_actors
from infra.ray.group import WorkerGroup
from infra.ray.pool import WorkerPool
from infra.workers.actor import actor_class
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.step import RunHandle

Role = Literal["policy", "reference", "rollout"]

_RANK = ("incarnation", "open_rendezvous", "start", "score")  # the methods of every rank
_WEIGHTS = ("weight_group_member", "init_weight_group")

_worker = partial(actor_class, mixins=(health.Pingable,))
_CLASSES: dict[Role, type] = {
    "policy": _worker(
        "infra.workers.policy:PolicyWorker",
        *(*_RANK, *_WEIGHTS, "handle", "score_reference", "update", "save", "finish_saving", "retain"),
        *("open_weight_rendezvous", "send_weights", "read_weights", "drop_sent_weights"),
    ),
    "reference": _worker("infra.workers.reference:ReferenceWorker", *_RANK),
    "rollout": _worker(
        "infra.workers.rollout:RolloutWorker",
        *(*_WEIGHTS, "start", "version", "load_weights", "generate", "has_shard", "put", "evaluate"),
    ),
}


def worker_name(run_id: str, role: Role, number: int = 0) -> str:
    """Return the name under which every process of the cluster finds a run's worker."""
    return f"{run_id}/{role}-{number}"


def num_workers(config: RunConfig) -> dict[Role, int]:
    """Return how many workers of each role a run has."""
    return {
        "policy": config.runtime.num_policy_ranks,
        "reference": config.runtime.num_reference_ranks if config.needs_reference_worker else 0,
        "rollout": config.rollout.num_workers,
    }


async def start_workers(run: RunHandle) -> None:
    """Find or create all workers of the run, and wait until all have started: they start at the same time.

    Raises:
        PipelineError: What the first worker to fail raised.
    """
    starts: list[Awaitable[object]] = [get_group(run, "policy")]
    if run.config.needs_reference_worker:
        starts.append(get_group(run, "reference"))
    starts += [get_worker(run, "rollout", number) for number in range(run.config.rollout.num_workers)]
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def get_worker(run: RunHandle, role: Role, number: int = 0) -> Any:
    """Find or create a worker, and wait until it has started."""
    worker = _find_or_create(run, role, number)
    await call(worker, "start")
    return worker


def rollout_pool(run: RunHandle) -> WorkerPool:
    """Return the pool of the run's rollout workers."""
    return WorkerPool(
        run.config.rollout.num_workers,
        get=lambda number: get_worker(run, "rollout", number),
        is_alive=lambda number: find_worker(run.run_id, "rollout", number) is not None,
    )


def find_worker(run_id: str, role: Role, number: int = 0) -> Any | None:
    """Return a worker's handle, or None if it doesn't exist."""
    return find_actor(worker_name(run_id, role, number))


async def get_group(run: RunHandle, role: Role) -> WorkerGroup:
    """Find or create the ranks of the run's policy or reference, and have them join one process group.

    If a rank of an earlier group is missing, the others can't continue without it: they are killed, and all ranks are
    created again. The policy then holds the newest checkpoint's version.

    Raises:
        PipelineError: A rank's error in loading its weights.
    """
    numbers = range(num_workers(run.config)[role])
    group = WorkerGroup({worker_name(run.run_id, role, rank): _find_or_create(run, role, rank) for rank in numbers})
    incarnations = set(await group.call("incarnation"))
    if len(incarnations) == 1 and "" not in incarnations:
        return group
    if incarnations != {""}:
        group.kill()
        return await get_group(run, role)
    rendezvous = await call(group.ranks[0], "open_rendezvous", len(group.ranks))
    await group.call("start", rendezvous)
    return group


def find_group(run: RunHandle, role: Role) -> WorkerGroup | None:
    """Return the run's policy or reference if all its ranks exist; create nothing."""
    names = [worker_name(run.run_id, role, rank) for rank in range(num_workers(run.config)[role])]
    ranks = {name: actor for name in names if (actor := find_actor(name)) is not None}
    return WorkerGroup(ranks) if len(ranks) == len(names) else None


def kill_workers(run_id: str, config: RunConfig) -> None:
    """Kill all workers of the run, which frees their memory."""
    counts = num_workers(config).items()
    kill_actors(worker_name(run_id, role, number) for role, count in counts for number in range(count))


def monitored_workers(run_id: str, config: RunConfig) -> AbstractContextManager[None]:
    """Kill, during the block, each of the run's workers and its store's index that stops answering."""
    from infra.stores.shared_open import index_name

    names = [
        worker_name(run_id, role, number) for role, count in num_workers(config).items() for number in range(count)
    ]
    return health.monitored_actors([*names, index_name(run_id)], config.runtime.worker_timeout_seconds)


def check_resources(config: RunConfig) -> None:
    """Check that the cluster has enough GPUs, or at least a core for every policy rank.

    Raises:
        ConfigError: It has too few.
    """
    import ray

    found, ranks = ray.cluster_resources(), config.runtime.num_policy_ranks
    if config.runtime.device == "cuda" and found.get("GPU", 0) < (wanted := _gpus_wanted(config)):
        listed = ", ".join(f"{count} {role}" for role, count in num_workers(config).items() if count)
        raise ConfigError(
            f'runtime.device = "cuda" needs {wanted:g} GPUs for {listed}, but the Ray cluster has '
            f"{found.get('GPU', 0):g}; lower runtime.num_policy_ranks or runtime.gpus_per_worker, or add GPUs"
        )
    if not gpus_per_worker(config) and ranks > found.get("CPU", 0):
        raise ConfigError(
            f"runtime.num_policy_ranks = {ranks}, but the Ray cluster has {found.get('CPU', 0):g} cores; "
            "lower it, or add nodes"
        )


def gpus_per_worker(config: RunConfig) -> float:
    """Return the fraction of a GPU that each worker gets; 0 if the config or the cluster's size implies the CPU."""
    import ray

    runtime = config.runtime
    if runtime.device == "cpu":
        return 0
    enough = ray.cluster_resources().get("GPU", 0) >= _gpus_wanted(config)
    return runtime.gpus_per_worker if runtime.device == "cuda" or enough else 0


def _find_or_create(run: RunHandle, role: Role, number: int) -> Any:
    """Return a worker's handle; the worker may not have started yet."""
    if (found := find_worker(run.run_id, role, number)) is not None:
        return found
    name, num_gpus = worker_name(run.run_id, role, number), gpus_per_worker(run.config)
    return create_actor(name, _CLASSES[role], run, number, num_gpus=num_gpus, options=health.ACTOR_OPTIONS)


def _gpus_wanted(config: RunConfig) -> float:
    return sum(num_workers(config).values()) * config.runtime.gpus_per_worker
