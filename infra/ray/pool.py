"""A pool of interchangeable workers: a job goes to any worker that is ready, a dead worker's jobs to the others."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from schemas.errors import WorkerLostError

MAX_LOSSES_PER_WORKER = 2  # during one `dispatch`

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Job = Callable[[Any], Awaitable[Result]]  # takes the worker that runs it


class WorkerPool:
    """Workers numbered from 0, of which any may run a job.

    Args:
        num_workers: Their number.
        get: Starts a worker, or finds it, and returns its handle once it is ready.
        is_alive: Whether a worker exists, started or not.
    """

    def __init__(self, num_workers: int, get: Callable[[int], Awaitable[Any]], is_alive: Callable[[int], bool]) -> None:
        self.num_workers, self.get, self.is_alive = num_workers, get, is_alive

    async def dispatch(self, jobs: Mapping[int, Job[Result]], owners: Mapping[int, int] | None = None) -> list[Result]:
        """Run every job on one of the workers; return the results in the order of the jobs.

        Jobs are assigned one at a time, so that a faster worker gets more. A job whose worker dies is run by another
        one; the dead worker is created again, and gets jobs when it is ready. So a job's result must not depend on the
        worker that runs it.

        Args:
            jobs: By number.
            owners: The worker that is to run a job, for as long as it lives; the other jobs are for any worker.

        Raises:
            WorkerLostError: Workers died more often than `MAX_LOSSES_PER_WORKER` times their number.
            PipelineError: A job raised it; the others are cancelled.
        """
        dispatch = _Dispatch(self, jobs, dict(owners or {}))
        try:
            while len(dispatch.results) < len(jobs):
                dispatch.assign()
                done, _ = await asyncio.wait(dispatch.tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    dispatch.collect(task)
        finally:
            for task in dispatch.tasks:
                task.cancel()
            await asyncio.gather(*dispatch.tasks, return_exceptions=True)
        return [dispatch.results[job] for job in jobs]


class _Dispatch:
    """The state of one `dispatch`: the workers that are ready, the jobs in progress, and the jobs that are left."""

    def __init__(self, pool: WorkerPool, jobs: Mapping[int, Job[Any]], owners: dict[int, int]) -> None:
        self._pool, self._jobs, self._owners = pool, jobs, owners
        self._waiting = deque(jobs)
        self._handles: dict[int, Any] = {}  # of workers that have become ready
        self._idle: deque[int] = deque()  # ready workers without a job
        self._num_losses = 0
        self.tasks: dict[asyncio.Task[Any], tuple[int, int | None]] = {}  # worker and job; None: it is starting
        self.results: dict[int, Any] = {}
        for worker in range(pool.num_workers):
            if worker in owners.values() and not pool.is_alive(worker):
                self._release_jobs(worker, "it is gone")
            self._start(worker)

    def assign(self) -> None:
        """Give every idle worker a job that it may run, if there is one."""
        for worker in list(self._idle):
            job = next((job for job in self._waiting if self._owners.get(job, worker) == worker), None)
            if job is not None:
                self._waiting.remove(job)
                self._idle.remove(worker)
                self._run(worker, job, self._jobs[job](self._handles[worker]))

    def collect(self, task: asyncio.Task[Any]) -> None:
        """Record a finished task's result, or put its job back if its worker died."""
        worker, job = self.tasks.pop(task)
        try:
            result = task.result()
        except WorkerLostError as error:
            self._num_losses += 1
            if self._num_losses > MAX_LOSSES_PER_WORKER * self._pool.num_workers:
                raise
            if job is not None:
                self._waiting.appendleft(job)
            self._release_jobs(worker, str(error))
            self._start(worker)
            return
        if job is None:
            self._handles[worker] = result
        else:
            self.results[job] = result
        self._idle.append(worker)

    def _start(self, worker: int) -> None:
        self._run(worker, None, self._pool.get(worker))

    def _release_jobs(self, worker: int, reason: str) -> None:
        """Let other workers run the jobs that this worker owned."""
        logger.warning("rollout worker %d is lost, other workers take over its work: %s", worker, reason)
        self._owners = {job: owner for job, owner in self._owners.items() if owner != worker}

    def _run(self, worker: int, job: int | None, work: Awaitable[Any]) -> None:
        self.tasks[asyncio.ensure_future(work)] = worker, job
