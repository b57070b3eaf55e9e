"""The evaluate operation: held-out accuracy of one policy version."""

from functools import partial

from infra.ray.actors import call
from infra.weights.sync import sync_weights
from infra.workers.launch import get_group, get_worker
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.stage import operation


@operation("evaluate")
async def evaluate_policy(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    """Evaluate the policy on the held-out prompts."""
    worker = await get_worker(run, "rollout")
    await sync_weights(run.config, policy.version, [worker], partial(get_group, run, "policy"))
    return await call(worker, "evaluate", policy.version)
