"""The run's workers by role: find, create and kill them."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from infra.ray import health
from infra.ray.actors import call, create_actor, find_actor, find_actors, kill_actors
from infra.ray.pool import WorkerPool
from infra.ray.ranks import WorkerGroup
from infra.storage.driver_lock import holds_lock
from infra.storage.runs import RunDirectory
from infra.workers.actor import PlacedActor, actor_class
from infra.workers.layout import Role, frozen_groups, num_workers, worker_name, worker_numbers
from infra.workers.placement import place, release
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, EngineLostError, WorkerLostError
from schemas.placement import WorkerPlace
from schemas.step import RunHandle

logger = logging.getLogger(__name__)

_TURNS = ("sleep", "wake")
_RANK = ("incarnation", "prepare", "open_rendezvous", "start", "score", *_TURNS)  # the methods of every rank
_WEIGHTS = ("weight_group_member", "init_weight_group")

_POLICY = ("handle", "score_reference", "update", "save", "finish_saving", "retain", "restore")

_worker = partial(actor_class, base=PlacedActor)
_CLASSES: dict[Role, type] = {
    "policy": _worker(
        "infra.workers.policy:PolicyWorker",
        *(*_RANK, *_WEIGHTS, *_POLICY, "score_teacher", "teacher_rows"),
        *("open_weight_rendezvous", "send_weights"),
    ),
    "reference": _worker("infra.workers.scoring:ReferenceWorker", *_RANK),
    "teacher": _worker("infra.workers.scoring:TeacherWorker", *_RANK, "teacher_rows"),
    "rollout": _worker(
        "infra.workers.rollout:RolloutWorker",
        *(*_WEIGHTS, *_TURNS, "start", "load_weights", "generate", "put", "describe_reused", "put_reused"),
        *("num_held_out", "evaluate"),
    ),
    "reward": _worker("infra.workers.reward:RewardWorker", *_TURNS, "start", "score"),
}
_SFT_POLICY = _worker(
    "infra.workers.sft:SftWorker",
    *(*_RANK, *_POLICY, "describe_rows", "put_rows", "plan_held_out", "score_held_out"),
)


async def start_workers(run: RunHandle) -> list[WorkerPlace]:
    """Find or create all workers of the run, and wait until all have started: at the same time, unless they take turns.

    Raises:
        PipelineError: What the first worker to fail raised.
    """
    engines = _start_all(run, "rollout")
    if run.config.time_shares_gpus:  # an engine needs its memory to start; then it waits for its turn
        for worker in await _all(engines):
            await call(worker, "sleep", ("weights", "cache"))
        engines = []
    groups = [get_group(run, "policy"), *(get_group(run, *group) for group in frozen_groups(run.config))]
    await _all([*groups, *engines, *_start_all(run, "reward")])
    workers = find_actors(worker_name(run.identity, *worker) for worker in worker_numbers(run.config))
    return list(await asyncio.gather(*(call(worker, "place") for worker in workers.values())))


async def get_worker(run: RunHandle, role: Role, number: int = 0, found: Any | None = None) -> Any:
    """Find or create a worker, and wait until it has started; one whose engine has lost a process is created again.

    Raises:
        WorkerLostError: It died; or its node can't be reached, and it was killed.
    """
    if (worker := found or find_worker(run.identity, role, number)) is None:
        worker = (await _create_workers(run, role, [number]))[number]
    try:
        await call(worker, "start")
    except EngineLostError as error:
        logger.warning("%s-%d is created again: %s", role, number, error)
        await asyncio.to_thread(kill_actors, [worker_name(run.identity, role, number)])
        try:
            return await get_worker(run, role, number)
        except ConfigError as failed:  # its engine has run with this config: what keeps it from starting may pass
            raise WorkerLostError(f"{role}-{number} can't be created again: {failed}") from failed
    except WorkerLostError:  # of a lost node, Ray knows for a while only that its workers don't answer
        await asyncio.to_thread(kill_actors, [worker_name(run.identity, role, number)])
        raise
    return worker


def rollout_pool(run: RunHandle) -> WorkerPool:
    """Return the pool of the run's rollout workers."""
    return WorkerPool(
        run.config.rollout.num_workers,
        find=partial(find_workers, run, "rollout"),
        start=partial(get_worker, run, "rollout"),
    )


def find_worker(identity: str, role: Role, number: int = 0) -> Any | None:
    """Return a worker's handle, or None if it doesn't exist."""
    return find_actor(worker_name(identity, role, number))


def find_workers(run: RunHandle, role: Role) -> dict[int, Any]:
    """Return the handles of those of a role's workers that exist, by ascending number."""
    names = {worker_name(run.identity, role, number): number for number in range(num_workers(run.config)[role])}
    return {names[name]: worker for name, worker in find_actors(names).items()}


async def get_group(run: RunHandle, role: Role, numbers: range | None = None) -> WorkerGroup:
    """Find or create the ranks of the run's policy, reference or a teacher, and have them join one process group.

    If a rank of an earlier group is missing, or hasn't begun a checkpoint that others have, these can't continue
    without it: all ranks are killed and created again. The policy then holds the newest checkpoint's version.

    Args:
        run: The run.
        role: The ranks' role.
        numbers: Their numbers among the workers of it; None: all.

    Raises:
        PipelineError: A rank's error in loading its weights.
    """
    numbers = range(num_workers(run.config)[role]) if numbers is None else numbers
    found = find_workers(run, role)
    found.update(await _create_workers(run, role, [rank for rank in numbers if rank not in found]))
    group = _group(run, {worker_name(run.identity, role, rank): found[rank] for rank in numbers})
    incarnations = set(await group.call("incarnation"))
    if len(incarnations) == 1 and "" not in incarnations:
        return group
    if incarnations != {""}:
        group.kill()
        return await get_group(run, role, numbers)
    await group.call("prepare")
    rendezvous = await call(group.ranks[0], "open_rendezvous", len(group.ranks))
    await group.call("start", rendezvous)
    return group


def find_group(run: RunHandle, role: Role, numbers: range | None = None) -> WorkerGroup | None:
    """Return a group of ranks, see `get_group`, if all of them exist; create nothing."""
    numbers = range(num_workers(run.config)[role]) if numbers is None else numbers
    found = find_workers(run, role)
    ranks = {worker_name(run.identity, role, rank): found[rank] for rank in numbers if rank in found}
    return _group(run, ranks) if len(ranks) == len(numbers) else None


def _group(run: RunHandle, ranks: dict[str, Any]) -> WorkerGroup:
    return WorkerGroup(ranks, may_kill=lambda: holds_lock(RunDirectory.of(run)))


def kill_workers(identity: str, config: RunConfig) -> None:
    """Kill all workers of the run, which frees their memory and GPUs."""
    kill_actors(worker_name(identity, *worker) for worker in worker_numbers(config))
    release(identity)


def monitored_workers(identity: str, config: RunConfig) -> AbstractContextManager[Callable[[], set[str]]]:
    """Kill, during the block, each of the run's workers and its store's index that hangs; give the others' nodes."""
    from infra.stores.shared.index import index_name

    names = [worker_name(identity, *worker) for worker in worker_numbers(config)]
    return health.monitored_actors([*names, index_name(identity)], config.timeouts.worker_seconds)


async def _all(starts: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all of them, whatever fails; raise the first error."""
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def _start_all(run: RunHandle, role: Role) -> list[Awaitable[Any]]:
    """Return the starts of all workers of a role that needs no process group; those that exist are found at once."""
    found = find_workers(run, role)
    return [get_worker(run, role, number, found.get(number)) for number in range(num_workers(run.config)[role])]


async def _create_workers(run: RunHandle, role: Role, numbers: Sequence[int]) -> dict[int, Any]:
    """Create workers and return their handles by number; they may not have started yet."""
    kind = _SFT_POLICY if role == "policy" and run.config.sft is not None else _CLASSES[role]
    secrets = {variable: os.environ[variable] for variable in run.config.services.secrets}  # set by the driver's start
    created = {}
    for number, (slot, options) in zip(numbers, await place(run, role, numbers), strict=True):
        name, options = worker_name(run.identity, role, number), {**health.ACTOR_OPTIONS, **options}
        created[number] = create_actor(name, kind, slot, run, number, secrets, options=options)
    return created
