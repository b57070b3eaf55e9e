"""Rollout workers as one crew: work goes to whoever is free, and a dead worker's work to the others."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from prefect import get_run_logger

from infra.cluster import get_worker
from schemas.errors import WorkerLostError
from schemas.step import RunHandle

MAX_LOSSES_PER_WORKER = 2  # in one stage

Result = TypeVar("Result")
Job = Callable[[Any], Awaitable[Result]]  # what is asked of a worker


async def deal(
    run: RunHandle, jobs: Mapping[int, Job[Result]], owners: Mapping[int, int] | None = None
) -> list[Result]:
    """Do every job on one of the run's rollout workers; the results are in the order of the jobs.

    Jobs are dealt one at a time, so that a worker that is faster gets more. A job whose worker dies is done by another
    one, and the dead worker is created anew when it is its turn. So what a job gives must not depend on who does it.

    Args:
        run: The run.
        jobs: By number.
        owners: Which worker is to do a job, as long as it lives; the others are for any.

    Raises:
        WorkerLostError: Workers died more often than `MAX_LOSSES_PER_WORKER` times their number.
        PipelineError: What a job raised; the others are given up.
    """
    crew = _Crew(run, jobs, dict(owners or {}))
    try:
        while crew.waiting or crew.running:
            crew.hand_out()
            done, _ = await asyncio.wait(crew.running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                crew.take(task)
    finally:
        for task in crew.running:
            task.cancel()
        await asyncio.gather(*crew.running, return_exceptions=True)
    return [crew.results[job] for job in jobs]


class _Crew:
    """Who does what, and what is left."""

    def __init__(self, run: RunHandle, jobs: Mapping[int, Job[Any]], owners: dict[int, int]) -> None:
        self._run, self._jobs, self._owners = run, jobs, owners
        self._num_workers = run.config.rollout.num_workers
        self._idle = deque(range(self._num_workers))
        self._num_losses = 0
        self.waiting = deque(jobs)
        self.running: dict[asyncio.Task[Any], tuple[int, int]] = {}
        self.results: dict[int, Any] = {}

    def hand_out(self) -> None:
        """Give every idle worker a job that it may do, if there is one."""
        for worker in list(self._idle):
            job = next((job for job in self.waiting if self._owners.get(job, worker) == worker), None)
            if job is not None:
                self._idle.remove(worker)
                self.waiting.remove(job)
                self.running[asyncio.create_task(self._do(job, worker))] = job, worker

    def take(self, task: asyncio.Task[Any]) -> None:
        """Take in what a worker did, or put its job back."""
        job, worker = self.running.pop(task)
        self._idle.append(worker)  # the dead one last: the living go first
        try:
            self.results[job] = task.result()
        except WorkerLostError as error:
            self._num_losses += 1
            if self._num_losses > MAX_LOSSES_PER_WORKER * self._num_workers:
                raise
            get_run_logger().warning("rollout worker %d is lost; its work is done again: %s", worker, error)
            self.waiting.appendleft(job)
            self._owners = {other: owner for other, owner in self._owners.items() if owner != worker}

    async def _do(self, job: int, worker: int) -> Any:
        return await self._jobs[job](await get_worker(self._run, "rollout", worker))
