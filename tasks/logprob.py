"""Log-probs of the stored responses: the policy's (behaviour) and the reference's."""

from infra.cluster import call, get_worker
from rl_core.views import with_column
from schemas.batch import BatchHandle
from schemas.rollout import PutResult
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import stage


@stage("logprob")
async def score_behavior(run: RunHandle, policy: PolicyHandle, batch: BatchHandle) -> BatchHandle:
    """Add `behavior_logprobs`: the trainer's log-probs under the weights that sampled."""
    worker = await get_worker(run, "policy")
    return _with_result(batch, await call(worker, "score", batch, policy.version))


@stage("reference")
async def score_reference(run: RunHandle, policy: PolicyHandle, batch: BatchHandle) -> BatchHandle:
    """Add `reference_logprobs`: the log-probs under the frozen starting weights."""
    worker = await get_worker(run, "reference")
    return _with_result(batch, await call(worker, "score", batch))


def _with_result(batch: BatchHandle, result: PutResult) -> BatchHandle:
    return with_column(batch, result.dtypes, [result.chunk], range(batch.num_rows))
