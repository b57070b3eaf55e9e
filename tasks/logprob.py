"""Log-probs of the stored responses: the policy's (behaviour) and the reference's."""

from infra.cluster import call, get_worker
from infra.stores.open import open_store
from rl_core.views import with_column
from schemas.batch import BatchHandle
from schemas.rollout import PutResult
from schemas.step import PolicyHandle, RunHandle, StoredBatch
from tasks.columns import note_batch
from tasks.stage import stage


@stage("logprob")
async def score_behavior(run: RunHandle, policy: PolicyHandle, batch: BatchHandle) -> StoredBatch:
    """Add `behavior_logprobs`: the trainer's log-probs under the weights that sampled."""
    worker = await get_worker(run, "policy")
    return _with_result(run, batch, await call(worker, "score", batch, policy.version))


@stage("reference")
async def score_reference(run: RunHandle, policy: PolicyHandle, batch: BatchHandle) -> StoredBatch:
    """Add `reference_logprobs`: the log-probs under the frozen starting weights."""
    worker = await get_worker(run, "reference")
    return _with_result(run, batch, await call(worker, "score", batch))


def _with_result(run: RunHandle, batch: BatchHandle, result: PutResult) -> StoredBatch:
    scored = with_column(batch, result.dtypes, [result.chunk], range(batch.num_rows))
    return note_batch(open_store(run), scored, [result.traffic])
