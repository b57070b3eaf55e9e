"""Stages are committed to the ledger, whatever the user's Prefect profile says of other tasks, and seldom retried."""

import asyncio
import os
import subprocess
import sys

import pytest
from prefect.states import Completed, exception_to_failed_state

from schemas.errors import ColumnNotFoundError, EngineLostError, RewardFailureError, WorkerLostError
from tasks.rollout import generate_rollouts

PROGRAM = """
from pathlib import Path

from prefect.cache_policies import CacheKeyFnPolicy

from flows.lifecycle.cancellation import Notice
from flows.step import new_step_flow
from flows.train import train
from tasks.rollout import generate_rollouts

for task in (generate_rollouts, generate_rollouts.named("next-rollout")):
    assert isinstance(task.cache_policy, CacheKeyFnPolicy), task.cache_policy
    assert task.refresh_cache is False
    assert task.persist_result is True
    assert (task.retries, task.retry_delay_seconds) == (2, 1)
    assert type(task) is type(generate_rollouts)
assert generate_rollouts.named("next-rollout").task_run_name == "next-rollout"
assert generate_rollouts.task_run_name != "next-rollout"
for flow in (train, new_step_flow(Path("ledger"), Notice(1.0))):
    assert (flow.retries, flow.persist_result) == (0, False), flow.name
"""
PROFILE = {
    "PREFECT_TASKS_DISABLE_CACHING": "true",
    "PREFECT_TASKS_REFRESH_CACHE": "true",
    "PREFECT_TASKS_DEFAULT_NO_CACHE": "true",
    "PREFECT_TASKS_DEFAULT_PERSIST_RESULT": "false",
    "PREFECT_TASKS_DEFAULT_RETRIES": "7",
    "PREFECT_TASKS_DEFAULT_RETRY_DELAY_SECONDS": "600",
    "PREFECT_FLOWS_DEFAULT_RETRIES": "7",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
}


def test_a_profile_does_not_change_the_ledger_or_what_is_retried() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env={**os.environ, **PROFILE})


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (WorkerLostError("gone"), True),
        (EngineLostError("gone"), True),
        (RewardFailureError("failed"), False),
        (ColumnNotFoundError("nowhere"), False),
        (ValueError("a bug"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_only_a_lost_worker_is_worth_a_retry(error: Exception, is_retried: bool) -> None:
    async def is_retried_after() -> bool:
        state = await exception_to_failed_state(error)
        return await generate_rollouts.retry_condition_fn(generate_rollouts, None, state)

    assert asyncio.run(is_retried_after()) is is_retried


def test_a_task_that_ended_well_is_not_retried() -> None:
    state = Completed(data=1)
    assert not asyncio.run(generate_rollouts.retry_condition_fn(generate_rollouts, None, state))
