"""A pool of interchangeable workers: a job goes to any worker that is ready, a dead worker's jobs to the others."""

import asyncio
import logging
from collections import defaultdict, deque
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
        find: Returns the handles of the workers that exist, ready or not, by number.
        start: Starts a worker, or finds it, and returns its handle once it is ready. It takes the worker's number, and
            its handle if that is known.
    """

    def __init__(
        self,
        num_workers: int,
        find: Callable[[], Mapping[int, Any]],
        start: Callable[[int, Any | None], Awaitable[Any]],
    ) -> None:
        self.num_workers, self.find, self.start = num_workers, find, start

    async def get_all(self) -> list[Any]:
        """Return the handles of all workers once they are ready; create those that don't exist."""
        found = self.find()
        return await asyncio.gather(*(self.start(worker, found.get(worker)) for worker in range(self.num_workers)))

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
        if not jobs:
            return []
        dispatch = _Dispatch(self, jobs, owners or {})
        workers = (dispatch.work(worker) for worker in range(self.num_workers))
        tasks = [asyncio.ensure_future(work) for work in (*workers, dispatch.finished.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [dispatch.results[job] for job in jobs]


class _Dispatch:
    """The state of one `dispatch`: the jobs that wait for a worker of their own, or for any, and the results."""

    def __init__(self, pool: WorkerPool, jobs: Mapping[int, Job[Any]], owners: Mapping[int, int]) -> None:
        self._pool, self._jobs = pool, jobs
        self._found = dict(pool.find())
        self._shared = deque(job for job in jobs if job not in owners)
        self._owned: defaultdict[int, deque[int]] = defaultdict(deque)  # by worker
        for job, owner in owners.items():
            self._owned[owner].append(job)
        for worker in self._owned.keys() - self._found.keys():
            self._release_jobs(worker, "it is gone")
        self._released = asyncio.Condition()
        self._num_losses = 0
        self.results: dict[int, Any] = {}
        self.finished = asyncio.Event()

    async def work(self, worker: int) -> None:
        """Run jobs on a worker until this is cancelled; create the worker again whenever it dies."""
        while True:
            job = None
            try:
                handle = await self._pool.start(worker, self._found.pop(worker, None))
                while True:
                    job = await self._next_job(worker)
                    self.results[job] = await self._jobs[job](handle)
                    job = None
                    if len(self.results) == len(self._jobs):
                        self.finished.set()
            except WorkerLostError as error:
                self._num_losses += 1
                if self._num_losses > MAX_LOSSES_PER_WORKER * self._pool.num_workers:
                    raise
                async with self._released:
                    if job is not None:
                        self._shared.appendleft(job)
                    self._release_jobs(worker, str(error))
                    self._released.notify_all()

    async def _next_job(self, worker: int) -> int:
        """Take a job that the worker may run; wait if there is none, as the other workers may die."""
        async with self._released:
            await self._released.wait_for(lambda: self._waiting(worker))
            return self._waiting(worker).popleft()

    def _waiting(self, worker: int) -> deque[int]:
        return self._owned.get(worker) or self._shared

    def _release_jobs(self, worker: int, reason: str) -> None:
        """Let other workers run the jobs that this worker owned."""
        logger.warning("rollout worker %d is lost, other workers take over its work: %s", worker, reason)
        self._shared.extend(self._owned.pop(worker, ()))
