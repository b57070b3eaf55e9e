"""Advantages and the step plan: computed on the driver, from per-row scalars and lengths alone."""

import numpy as np
import pyarrow as pa

from infra.stores.open import open_store
from rl_core.advantages import compute_advantages
from rl_core.planning.plan import plan_step
from rl_core.views import select, with_column
from schemas.batch import BatchHandle, ChunkKey
from schemas.errors import RewardFailureError
from schemas.metrics import Mean, Metrics, Sum
from schemas.rollout import RolloutHandle
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle
from tasks.columns import note_batch
from tasks.stage import stage


@stage("advantage")
async def compute_step_advantages(
    run: RunHandle, policy: PolicyHandle, batch: BatchHandle, rollout: RolloutHandle
) -> AdvantageHandle:
    """Select the rows whose reward did not fail, add their `advantages` and plan the updates.

    Raises:
        RewardFailureError: Every reward of the step failed.
    """
    live = [row for row, reward in enumerate(rollout.rewards) if reward is not None]
    if not live:
        failure = next((shard.failure for shard in rollout.shards if shard.failure), "no text")
        raise RewardFailureError(f"all {rollout.num_rows} rewards of step {policy.step} failed; the first: {failure}")
    rewards = np.array([rollout.rewards[row] for row in live], dtype=np.float64)
    groups = np.array(rollout.group_ids)[live]
    advantages = compute_advantages(rewards, groups, run.config.advantage)
    key = ChunkKey(run_id=run.run_id, step=policy.step, stage="advantage")
    store, rows = open_store(run), select(batch, live)
    chunk = store.put(key, pa.record_batch({"advantages": pa.array(advantages)}), rows)
    store.flush()
    trained = with_column(rows, {"advantages": "float"}, [chunk], range(len(live)))
    stored = note_batch(store, trained, [store.take_traffic("advantage")])
    plan = plan_step(
        np.array(rollout.prompt_lengths)[live],
        np.array(rollout.response_lengths)[live],
        np.array(rollout.loss_tokens)[live],
        num_updates=run.config.optim.updates_per_step,
        num_ranks=1,
        token_budget=run.config.packing.token_budget,
        seed=run.config.seed + policy.step,
    )
    return AdvantageHandle(
        batch=trained,
        plan=plan,
        metrics=_metrics(rewards, groups, rollout, plan.num_skipped_rows),
        traffic=stored.traffic,
    )


def _metrics(rewards: np.ndarray, groups: np.ndarray, rollout: RolloutHandle, num_skipped: int) -> Metrics:
    by_group = [rewards[groups == group] for group in np.unique(groups)]
    num_flat = sum(bool(np.all(group == group[0])) for group in by_group)
    finished = [reason for shard in rollout.shards for reason in shard.finish_reasons]
    lengths = rollout.response_lengths
    return {
        "reward": Mean(total=float(rewards.sum()), weight=len(rewards)),
        "reward/failed": Sum(value=rollout.num_rows - len(rewards)),
        "groups/zero_variance": Mean(total=num_flat, weight=len(by_group)),
        "response/tokens": Mean(total=sum(lengths), weight=len(lengths)),
        "response/truncated": Mean(total=finished.count("length"), weight=len(finished)),
        "tokens": Sum(value=sum(lengths) + sum(rollout.prompt_lengths)),
        "rows/skipped": Sum(value=num_skipped),
    }
