"""Rollout workers as one crew: work goes to whoever is ready, and a dead worker's work to the others."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from prefect import get_run_logger

from infra.cluster import find_worker, get_worker
from schemas.errors import WorkerLostError
from schemas.step import RunHandle

MAX_LOSSES_PER_WORKER = 2  # in one stage

Result = TypeVar("Result")
Job = Callable[[Any], Awaitable[Result]]  # what is asked of a worker


async def deal(
    run: RunHandle, jobs: Mapping[int, Job[Result]], owners: Mapping[int, int] | None = None
) -> list[Result]:
    """Do every job on one of the run's rollout workers; the results are in the order of the jobs.

    Jobs are dealt one at a time, so that a faster worker gets more. A job whose worker dies is done by another one; the
    dead worker is created anew, and joins when it is ready. So what a job gives must not depend on who does it.

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
        while len(crew.results) < len(jobs):
            crew.hand_out()
            done, _ = await asyncio.wait(crew.tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                crew.take(task)
    finally:
        for task in crew.tasks:
            task.cancel()
        await asyncio.gather(*crew.tasks, return_exceptions=True)
    return [crew.results[job] for job in jobs]


class _Crew:
    """Who is ready, who does what, and what is left."""

    def __init__(self, run: RunHandle, jobs: Mapping[int, Job[Any]], owners: dict[int, int]) -> None:
        self._run, self._jobs, self._owners = run, jobs, owners
        self._waiting = deque(jobs)
        self._handles: dict[int, Any] = {}  # of workers that have got ready
        self._ready: deque[int] = deque()  # those without a job
        self._num_workers, self._num_losses = run.config.rollout.num_workers, 0
        self.tasks: dict[asyncio.Task[Any], tuple[int, int | None]] = {}  # worker and job; None: it gets ready
        self.results: dict[int, Any] = {}
        for worker in range(self._num_workers):
            if worker in owners.values() and find_worker(run.run_id, "rollout", worker) is None:
                self._lose(worker, "it is gone")
            self._prepare(worker)

    def hand_out(self) -> None:
        """Give every worker that is ready a job that it may do, if there is one."""
        for worker in list(self._ready):
            job = next((job for job in self._waiting if self._owners.get(job, worker) == worker), None)
            if job is not None:
                self._waiting.remove(job)
                self._ready.remove(worker)
                self._run_task(worker, job, self._jobs[job](self._handles[worker]))

    def take(self, task: asyncio.Task[Any]) -> None:
        """Take in what a worker did, or put its job back."""
        worker, job = self.tasks.pop(task)
        try:
            result = task.result()
        except WorkerLostError as error:
            self._num_losses += 1
            if self._num_losses > MAX_LOSSES_PER_WORKER * self._num_workers:
                raise
            if job is not None:
                self._waiting.appendleft(job)
            self._lose(worker, str(error))
            self._prepare(worker)
            return
        if job is None:
            self._handles[worker] = result
        else:
            self.results[job] = result
        self._ready.append(worker)

    def _prepare(self, worker: int) -> None:
        self._run_task(worker, None, get_worker(self._run, "rollout", worker))

    def _lose(self, worker: int, reason: str) -> None:
        """Let others do what was this worker's."""
        get_run_logger().warning("rollout worker %d is lost, its work is done again: %s", worker, reason)
        self._owners = {job: owner for job, owner in self._owners.items() if owner != worker}

    def _run_task(self, worker: int, job: int | None, work: Awaitable[Any]) -> None:
        self.tasks[asyncio.ensure_future(work)] = worker, job
