"""Stages are committed to the ledger, whatever the user's Prefect profile says of other tasks."""

import os
import subprocess
import sys

PROGRAM = """
from prefect.cache_policies import CacheKeyFnPolicy
from tasks.rollout import generate_rollouts

for task in (generate_rollouts, generate_rollouts.named("next-rollout")):
    assert isinstance(task.cache_policy, CacheKeyFnPolicy), task.cache_policy
    assert task.refresh_cache is False
    assert task.persist_result is True
    assert type(task) is type(generate_rollouts)
assert generate_rollouts.named("next-rollout").task_run_name == "next-rollout"
assert generate_rollouts.task_run_name != "next-rollout"
"""
PROFILE = {
    "PREFECT_TASKS_DISABLE_CACHING": "true",
    "PREFECT_TASKS_REFRESH_CACHE": "true",
    "PREFECT_TASKS_DEFAULT_NO_CACHE": "true",
    "PREFECT_TASKS_DEFAULT_PERSIST_RESULT": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
}


def test_a_profile_without_caching_does_not_change_the_ledger() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env={**os.environ, **PROFILE})
