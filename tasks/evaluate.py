"""The evaluate operation: held-out accuracy of one policy version."""

import time
from functools import partial

from infra.ray.actors import call
from infra.workers.generate import evaluate_shard, sync_workers
from infra.workers.launch import get_worker, rollout_pool
from rl_core.rollout.evaluation import split_prompts, summarize
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.stage import operation


@operation("evaluate")
async def evaluate_policy(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    """Evaluate the policy on the held-out prompts, whose batches are dispatched to all rollout workers.

    The report is the same for any number of workers, whether or not one dies.

    Raises:
        RewardFailureError: More rewards failed than the config allows.
    """
    await sync_workers(run, policy.version)
    pool, started = rollout_pool(run), time.perf_counter()
    batches = split_prompts(run.config.eval, await call(await get_worker(run, "rollout"), "num_held_out"))
    jobs = {batch: partial(evaluate_shard, run, policy, rows) for batch, rows in batches.items()}
    return summarize(run.config, policy.version, await pool.dispatch(jobs), time.perf_counter() - started)
