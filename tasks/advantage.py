"""Advantages and the step plan: computed on the driver, from per-row scalars and lengths alone."""

import numpy as np
import pyarrow as pa

from infra.runs import RunDirectory
from infra.stores.open import open_store
from rl_core.advantages import compute_advantages
from rl_core.advantages.shaping import ShapedRows, shape_rows
from rl_core.planning.plan import plan_step
from rl_core.views import select, with_column
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.run import RunConfig
from schemas.errors import RewardFailureError
from schemas.metrics import Mean, Metrics, Sum
from schemas.rollout import RolloutHandle
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle
from tasks.columns import note_batch
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

    Where all rewards of a group are equal, its advantages are 0, but its rows are trained on: the KL term and the
    entropy bonus still act, and the step's denominators don't depend on rewards.

    Args:
        run: The run.
        policy: The policy that sampled.
        batch: The step's rows, with all columns that the update needs but `advantages`.
        rollout: What is known of the same rows, in the same order.
        row_kl: Each row's KL to the reference, summed over its trained tokens, in nats; only where the KL is in
            the reward.

    Raises:
        NonFiniteError: A row's KL isn't finite.
        PlanError: No row has a token to train on, as when all responses are masked as overlong.
        RewardFailureError: Every reward of the step failed.
    """
    config = run.config
    live = [row for row, reward in enumerate(rollout.rewards) if reward is not None]
    if not live:
        failure = next((shard.failure for shard in rollout.shards if shard.failure), "no text")
        raise RewardFailureError(f"all {rollout.num_rows} rewards of step {policy.step} failed; the first: {failure}")
    rewards = np.array([rollout.rewards[row] for row in live], dtype=np.float64)
    groups, lengths = np.array(rollout.group_ids)[live], np.array(rollout.response_lengths)[live]
    shaped = _shape(config, rollout, live, rewards, row_kl)
    advantages = compute_advantages(
        shaped.rewards, groups, config.advantage, response_lengths=lengths, loss_tokens=shaped.loss_tokens
    )
    key = ChunkKey(run_id=run.run_id, step=policy.step, stage="advantage")
    store, rows = open_store(run), select(batch, live)
    chunk = store.put(key, pa.record_batch({"advantages": pa.array(advantages)}), rows)
    store.flush()
    trained = with_column(rows, {"advantages": "float"}, [chunk], range(len(live)))
    stored = note_batch(store, trained, [store.take_traffic("advantage")])
    plan = plan_step(
        np.array(rollout.prompt_lengths)[live],
        lengths,
        shaped.loss_tokens,
        num_updates=config.optim.updates_per_step,
        num_ranks=config.runtime.num_policy_ranks,
        token_budget=config.packing.token_budget,
        seed=config.seed + policy.step,
    )
    RunDirectory.of(run).save_plan(policy.step, plan)
    metrics = _metrics(rewards, shaped.rewards, groups, rollout, plan.num_skipped_rows)
    return AdvantageHandle(batch=trained, plan=plan, metrics=metrics | shaped.metrics, traffic=stored.traffic)


def _shape(
    config: RunConfig,
    rollout: RolloutHandle,
    live: list[int],
    rewards: np.ndarray,
    row_kl: tuple[float, ...] | None,
) -> ShapedRows:
    assert row_kl is None or len(row_kl) == rollout.num_rows, "row_kl is not of the rollout's rows"
    finished = np.array([reason for shard in rollout.shards for reason in shard.finish_reasons])
    return shape_rows(
        rewards,
        response_lengths=np.array(rollout.response_lengths)[live],
        loss_tokens=np.array(rollout.loss_tokens)[live],
        is_truncated=(finished == "length")[live],
        row_kl=None if row_kl is None else [row_kl[row] for row in live],
        overlong=config.overlong,
        kl=config.kl,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def _metrics(
    rewards: np.ndarray, shaped: np.ndarray, groups: np.ndarray, rollout: RolloutHandle, num_skipped: int
) -> Metrics:
    by_group = [shaped[groups == group] for group in np.unique(groups)]
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
