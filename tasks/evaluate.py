"""Evaluate: held-out accuracy of one policy version."""

from infra.cluster import call, get_worker
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.publish import bring_to
from tasks.stage import operation


@operation("evaluate")
async def evaluate_policy(run: RunHandle, policy: PolicyHandle) -> EvalReport:
    """Score the held-out prompts under the policy."""
    worker = await get_worker(run, "rollout")
    await bring_to(run, policy.version, worker)
    return await call(worker, "evaluate", policy.version)
