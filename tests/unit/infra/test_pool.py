"""Dispatch of jobs to workers: each takes its next job itself, the jobs of lost ones go to the others."""

import asyncio
from functools import partial

import pytest

from infra.ray.pool import MAX_LOSSES_PER_WORKER, WorkerPool
from schemas.errors import PipelineError, WorkerLostError


class Workers:
    """Workers that exist or not; a handle is the worker's number and how often it was created."""

    def __init__(self, num_workers: int, existing: set[int]) -> None:
        self.found = {worker: f"{worker}.0" for worker in existing}
        self.num_created = 0
        self.pool = WorkerPool(num_workers, find=lambda: self.found, start=self.start)

    async def start(self, number: int, found: str | None) -> str:
        await asyncio.sleep(0)
        if found is None:
            self.num_created += 1
        return found or f"{number}.{self.num_created}"


async def run(calls: list[tuple[int, str]], lost: set[str], job: int, worker: str) -> str:
    await asyncio.sleep(0)
    calls.append((job, worker))
    if worker in lost:
        raise WorkerLostError(f"{worker} died")
    return f"result {job}"


def dispatch(workers: Workers, jobs: list[int], lost: set[str], owners: dict[int, int]) -> list[tuple[int, str]]:
    """Run the jobs, check their results, and return which worker ran which."""
    calls: list[tuple[int, str]] = []
    work = {job: partial(run, calls, lost, job) for job in jobs}
    assert asyncio.run(workers.pool.dispatch(work, owners)) == [f"result {job}" for job in jobs]
    return calls


def test_every_worker_runs_jobs_and_results_are_in_order() -> None:
    calls = dispatch(Workers(3, {0, 1, 2}), [5, 3, 9, 1, 7], set(), {})
    assert {worker for _, worker in calls} == {"0.0", "1.0", "2.0"}
    assert len(calls) == 5
    assert dispatch(Workers(2, set()), [], set(), {}) == []


def test_jobs_run_on_their_owners_while_these_live() -> None:
    calls = dispatch(Workers(2, {0, 1}), [0, 1, 2, 3], set(), {0: 1, 1: 1, 2: 1, 3: 1})
    assert {worker for _, worker in calls} == {"1.0"}


def test_the_jobs_of_an_owner_that_is_gone_go_to_the_others() -> None:
    workers = Workers(2, {0})
    calls = dispatch(workers, [0, 1, 2], set(), {0: 1, 1: 1, 2: 0})
    assert sorted(job for job, _ in calls) == [0, 1, 2]
    assert workers.num_created == 1


def test_an_idle_worker_takes_over_the_jobs_of_one_that_dies() -> None:
    calls = dispatch(Workers(2, {0, 1}), [0, 1], {"1.0"}, {0: 1, 1: 1})
    assert calls[0] == (0, "1.0")
    assert sorted(job for job, worker in calls if worker != "1.0") == [0, 1]


def test_workers_that_die_too_often_and_failed_jobs_end_a_dispatch() -> None:
    with pytest.raises(WorkerLostError):
        dispatch(Workers(1, {0}), [0], {"0.0", *(f"0.{number}" for number in range(1, MAX_LOSSES_PER_WORKER + 1))}, {})

    async def fail(worker: str) -> str:
        raise PipelineError("no such thing")

    with pytest.raises(PipelineError, match="no such thing"):
        asyncio.run(Workers(2, {0, 1}).pool.dispatch({0: fail, 1: partial(run, [], set(), 1)}))
