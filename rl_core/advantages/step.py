"""The advantages of one step and the plan of its updates, from per-row scalars and lengths alone.

N rows, n with a reward. This runs on the driver, which reads no columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.base import Floats, Ints
from rl_core.advantages.estimators import compute_advantages
from rl_core.advantages.shaping import ShapedRows, shape_rows
from rl_core.planning.plan import plan_step
from schemas.config.run import RunConfig
from schemas.errors import RewardFailureError
from schemas.metrics import Mean, Metrics, Single, Sum
from schemas.plan import StepPlan
from schemas.rollout import RolloutHandle


@dataclass(frozen=True, eq=False)
class StepAdvantages:
    """The result of the advantage stage."""

    rows: list[int]  # [n], the rollout's rows whose reward did not fail, ascending
    advantages: NDArray[np.float32]  # [n]
    plan: StepPlan  # over the n rows
    metrics: Metrics


def prepare_updates(
    config: RunConfig, step: int, rollout: RolloutHandle, row_kl: Sequence[float] | None = None
) -> StepAdvantages:
    """Drop the rows whose reward failed, compute the advantages of the others and plan their updates.

    The advantages of a zero-variance group are 0, but its rows are still trained on: the KL term and the entropy bonus
    apply to them, and the denominators don't depend on rewards.

    Args:
        config: The run's config.
        step: The step; it seeds the plan.
        rollout: The step's rows.
        row_kl: [N] each row's KL to the reference, summed over its trained tokens, in nats; only if the KL is part of
            the reward.

    Raises:
        NonFiniteError: A row's KL isn't finite.
        PlanError: No row has a token to train on, as when all responses are masked as overlong.
        RewardFailureError: Every reward of the step failed.
    """
    live = [row for row, reward in enumerate(rollout.rewards) if reward is not None]
    if not live:
        failure = next((shard.failure for shard in rollout.shards if shard.failure), "no message")
        raise RewardFailureError(f"all {rollout.num_rows} rewards of step {step} failed; the first failure: {failure}")
    rewards = np.array([rollout.rewards[row] for row in live], dtype=np.float64)
    groups, lengths = np.array(rollout.group_ids)[live], np.array(rollout.response_lengths)[live]
    shaped = _shape(config, rollout, live, rewards, row_kl)
    plan = plan_step(
        np.array(rollout.prompt_lengths)[live],
        lengths,
        shaped.loss_tokens,
        num_updates=config.optim.updates_per_step,
        num_ranks=config.runtime.num_policy_ranks,
        token_budget=config.packing.token_budget,
        seed=config.seed + step,
    )
    return StepAdvantages(
        rows=live,
        advantages=compute_advantages(
            shaped.rewards, groups, config.advantage, response_lengths=lengths, loss_tokens=shaped.loss_tokens
        ),
        plan=plan,
        metrics=_metrics(rewards, shaped.rewards, groups, rollout, plan.num_skipped_rows) | shaped.metrics,
    )


def _shape(
    config: RunConfig, rollout: RolloutHandle, live: list[int], rewards: Floats, row_kl: Sequence[float] | None
) -> ShapedRows:
    assert row_kl is None or len(row_kl) == rollout.num_rows, "row_kl must have one value per row of the rollout"
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


def _metrics(rewards: Floats, shaped: Floats, groups: Ints, rollout: RolloutHandle, num_skipped: int) -> Metrics:
    by_group = [shaped[groups == group] for group in np.unique(groups)]
    num_zero_variance = sum(bool(np.all(group == group[0])) for group in by_group)
    finished = [reason for shard in rollout.shards for reason in shard.finish_reasons]
    lengths = rollout.response_lengths
    return {
        "reward": Mean(total=float(rewards.sum()), weight=len(rewards)),
        "reward/p10": Single(value=float(np.quantile(rewards, 0.1))),
        "reward/p90": Single(value=float(np.quantile(rewards, 0.9))),
        "reward/failed": Sum(value=rollout.num_rows - len(rewards)),
        "reward/failed_fraction": Mean(total=rollout.num_rows - len(rewards), weight=rollout.num_rows),
        "groups/zero_variance": Mean(total=num_zero_variance, weight=len(by_group)),
        "response/tokens": Mean(total=sum(lengths), weight=len(lengths)),
        "response/truncated": Mean(total=finished.count("length"), weight=len(finished)),
        "tokens": Sum(value=sum(lengths) + sum(rollout.prompt_lengths)),
        "rows/skipped": Sum(value=num_skipped),
    }
