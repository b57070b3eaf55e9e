"""The advantage stage, computed on the driver from per-row scalars and lengths alone, and the update stage."""

import numpy as np
import pyarrow as pa

from infra.storage.ledger import update_key
from infra.storage.runs import RunDirectory
from infra.stores.open import open_store
from infra.stores.step_columns import publish_handle
from infra.workers.launch import get_group
from rl_core.advantages import prepare_updates
from rl_core.columns.jagged import jagged
from rl_core.views import number_prompts, select, with_column
from schemas.batch import BatchHandle, ChunkKey, StoreTraffic
from schemas.rollout import RolloutHandle
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle, StoredBatch, UpdateReport
from tasks.stage import stage


@stage("advantage")
async def compute_step_advantages(
    run: RunHandle,
    policy: PolicyHandle,
    batch: BatchHandle,
    rollout: RolloutHandle,
    row_kl: tuple[float, ...] | None = None,
) -> AdvantageHandle:
    """Select the rows whose reward did not fail, add their `advantages` and plan the updates.

    In supervised fine-tuning, only plan.

    Args:
        run: The run.
        policy: The policy that sampled.
        batch: The step's rows, with all columns that the update needs except `advantages`.
        rollout: The scalars of the same rows, in the same order.
        row_kl: Each row's KL to the reference, in nats, if the KL is part of the reward.

    Raises:
        NonFiniteError: A row's KL is not finite.
        PlanError: No row has a token to train on.
        RewardFailureError: Every reward of the step failed.
    """
    result = prepare_updates(run.config, policy.step, rollout, row_kl, number_prompts(batch))
    stored = StoredBatch(batch=batch, traffic=StoreTraffic())
    if result.advantages is not None:
        stored = _put(run, select(batch, result.rows), result.advantages, result.turns)
    directory = RunDirectory.of(run)
    plan = result.plan.replace(lr_scale=directory.decisions.lr_scale(policy.step), num_steps=run.config.steps)
    directory.plans.save(policy.step, plan)
    return AdvantageHandle(batch=stored.batch, plan=plan, metrics=result.metrics, traffic=stored.traffic)


@stage("update", key=update_key)
async def update_policy(run: RunHandle, policy: PolicyHandle, advantage: AdvantageHandle) -> UpdateReport:
    """Apply the planned updates to the policy's version, exactly once; only this stage changes the policy."""
    group = await get_group(run, "policy")
    report, *_ = await group.call("update", advantage.batch, advantage.plan, policy.version)
    return report  # of all ranks, from rank 0


def _put(
    run: RunHandle, rows: BatchHandle, advantages: np.ndarray, turns: tuple[np.ndarray, np.ndarray] | None
) -> StoredBatch:
    store, key = open_store(run), ChunkKey(run_id=run.run_id, step=rows.step, stage="advantage")
    columns: dict[str, pa.Array] = {"advantages": pa.array(advantages)}
    if turns is not None:
        counts, of_turns = turns
        columns["turn_advantages"] = jagged(of_turns, counts)
    chunk = store.put(key, pa.record_batch(columns), rows)
    store.flush()
    trained = with_column(rows, dict.fromkeys(columns, "float"), [chunk], np.arange(rows.num_rows))
    return publish_handle(store, trained, [store.take_traffic("advantage")])
