"""Turns on shared GPUs: before a phase, the workers that don't compute in it give up memory, then others take it.

rollout: optimizer, gradients and the weights of reference and teachers move out, engines allocate weights, the policy's
are published to them and move out as well, engines allocate their caches, and reward models move in. scoring: engines
give up all, reward models move out, the weights of policy, reference and teachers move in. update: those of the last
two move out, the optimizer moves in.

Every turn can be repeated, from any state: a worker that was started again holds all of its parts, one that was moved
before moves nothing, and a model that is called moves in what the call needs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

from infra.ray.actors import call
from infra.workers.launch import find_group, find_workers, rollout_pool
from infra.workers.layout import Role, frozen_groups
from schemas.errors import WorkerLostError
from schemas.placement import EngineTag, MemoryChange, Part, PhaseMemory
from schemas.step import RunHandle
from schemas.weights import WeightsTransfer

ENGINE_TAGS: tuple[EngineTag, ...] = ("weights", "cache")
OF_UPDATES: tuple[Part, ...] = ("optimizer", "gradients")

Method = Literal["sleep", "wake"]
GetWorkers = Callable[[], Awaitable[Sequence[Any]]]
Sync = Callable[[Sequence[Any]], Awaitable[WeightsTransfer | None]]


class Synced(NamedTuple):
    """What a sync transferred, None if all engines held the version; and what moved if workers take turns."""

    transfer: WeightsTransfer | None
    memory: PhaseMemory | None = None


class Turn:
    """One turn of a run's workers: moves them, and adds up what they report."""

    def __init__(self, run: RunHandle) -> None:
        self._run, self._seconds = run, 0.0
        self._changes: list[tuple[Role, int, MemoryChange]] = []

    async def move(self, role: Role, method: Method, *parts: Part, numbers: range | None = None) -> None:
        """Have all ranks of a group, see `get_group`, `sleep` or `wake`; do nothing if one is missing."""
        if (group := find_group(self._run, role, numbers)) is not None and group.ranks:
            started = time.perf_counter()
            changes = await group.call(method, parts)
            self._changes += (
                (role, rank, change) for rank, change in enumerate(changes, numbers.start if numbers else 0)
            )
            self._seconds += time.perf_counter() - started

    async def move_frozen(self, method: Method) -> None:
        """Have the reference and the teachers `sleep` or `wake`."""
        for role, numbers in frozen_groups(self._run.config):
            await self.move(role, method, "weights", numbers=numbers)

    async def move_engines(self, workers: Sequence[Any], method: Method, *tags: EngineTag) -> None:
        """Have rollout workers `sleep` or `wake`.

        Raises:
            WorkerLostError: One died, or its engine failed.
        """
        started = time.perf_counter()
        changes = await asyncio.gather(*(call(worker, method, tags) for worker in workers))
        self._changes += (("rollout", number, change) for number, change in enumerate(changes))
        self._seconds += time.perf_counter() - started

    async def sleep_generating(self) -> None:
        """Have all engines and reward models sleep that there are."""
        await asyncio.gather(
            self.move_found("rollout", "sleep", *ENGINE_TAGS), self.move_found("reward", "sleep", "weights")
        )

    async def move_found(self, role: Role, method: Method, *parts: Part) -> None:
        """Have each worker of a role `sleep` or `wake`; a lost one holds nothing, and is created again when needed."""
        found = find_workers(self._run, role)
        outcomes = await asyncio.gather(*(self._move_found(worker, method, parts) for worker in found.values()))
        moved = zip(found, outcomes, strict=True)
        self._changes += ((role, number, change) for number, change in moved if change is not None)

    async def _move_found(self, worker: Any, method: Method, parts: Sequence[Part]) -> MemoryChange | None:
        started = time.perf_counter()
        try:
            change: MemoryChange = await call(worker, method, parts)
        except WorkerLostError:
            return None
        self._seconds = max(self._seconds, time.perf_counter() - started)
        return change

    def memory(self) -> PhaseMemory:
        """Return what moved so far, and what the workers then held."""
        return PhaseMemory.of(self._changes, self._seconds)


async def enter_rollout(run: RunHandle, get_workers: GetWorkers, sync: Sync) -> Synced:
    """Wake engines, publish to those that lack the version, and leave the memory to them.

    Args:
        run: The run.
        get_workers: Returns the rollout workers, which it may create.
        sync: Publishes to them; the policy moves its weights in if it is to send them.

    Raises:
        WorkerLostError: An engine, or the policy, died.
    """
    turn, is_missing = Turn(run), len(rollout_pool(run).find()) < run.config.rollout.num_workers
    await turn.move_frozen("sleep")
    await turn.move("policy", "sleep", *OF_UPDATES)
    if is_missing:  # an engine that starts needs all of its memory
        await turn.move("policy", "sleep", "weights")
        await turn.move_found("reward", "sleep", "weights")
    workers = await get_workers()
    await turn.move_engines(workers, "wake", "weights")
    transfer = await sync(workers)
    await turn.move("policy", "sleep", "weights")
    await turn.move_engines(workers, "wake", "cache")
    await turn.move_found("reward", "wake", "weights")
    return Synced(transfer, turn.memory())


async def enter_scoring(run: RunHandle) -> PhaseMemory:
    """Have engines and reward models sleep, and move the weights of policy and reference in."""
    turn = Turn(run)
    await turn.sleep_generating()
    await turn.move("policy", "wake", "weights")
    await turn.move_frozen("wake")
    return turn.memory()


async def enter_update(run: RunHandle) -> PhaseMemory:
    """Have engines and reward models sleep, move the reference out and all of the policy in, for updates."""
    turn = Turn(run)
    await turn.sleep_generating()
    await turn.move_frozen("sleep")
    await turn.move("policy", "wake", "weights", "optimizer")
    return turn.memory()
