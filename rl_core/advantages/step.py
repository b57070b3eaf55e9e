"""The advantages of one step and the plan of its updates, from per-row scalars and lengths alone.

N rows, n with a reward. This runs on the driver, which reads no columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.advantages.base import AdvantageInputs, Floats, Ints, Parts, find_equal, number_groups
from rl_core.advantages.estimators import estimate
from rl_core.advantages.shaping import ShapedRows, shape_rows
from rl_core.advantages.turn_level import Turns, advantages_of_turns
from rl_core.planning.plan import PrefixesLike, plan_step
from rl_core.rollout.responses import response_metrics
from rl_core.views.integers import as_int64
from schemas.config.advantage import GdpoAdvantage, TurnLevelAdvantage
from schemas.config.reward import WeightedReward
from schemas.config.run import RunConfig
from schemas.errors import RewardFailureError, UserError
from schemas.metrics import Mean, Metrics, Single, Sum
from schemas.plan import StepPlan
from schemas.rollout import RolloutHandle


@dataclass(frozen=True, eq=False)
class StepAdvantages:
    """The result of the advantage stage."""

    rows: Ints  # [n], the rollout's rows whose reward did not fail, ascending
    advantages: NDArray[np.float32] | None  # [n]; None: the rows are given answers, all of which are trained on
    turns: tuple[Ints, NDArray[np.float32]] | None  # [n] counts and [M] advantages of their turns, if those differ
    plan: StepPlan  # over the n rows
    metrics: Metrics


def prepare_updates(
    config: RunConfig,
    step: int,
    rollout: RolloutHandle,
    row_kl: Sequence[float] | None = None,
    prompts: Ints | None = None,
) -> StepAdvantages:
    """Drop the rows whose reward failed, compute the advantages of the others and plan their updates.

    The advantages of a zero-variance group are 0, but its rows are still trained on: the KL term and the entropy bonus
    apply to them, and the denominators don't depend on rewards. Metrics are those of the rows that the step sampled,
    without reused groups; only `tokens` and `rows/skipped` are those of all rows.

    Args:
        config: The run's config.
        step: The step; it seeds the plan.
        rollout: The step's rows.
        row_kl: [N] each row's KL to the reference, summed over its trained tokens, in nats; only if the KL is part of
            the reward.
        prompts: [N] see `number_prompts`, of rows that share their prompts if the config says so. None: none do.

    Raises:
        NonFiniteError: A row's KL isn't finite.
        PlanError: No row has a token to train on, as when all responses are masked as overlong.
        RewardFailureError: Every reward of the step failed, but for those of reused groups.
        UserError: The estimator needs reward parts that a reused group lacks.
    """
    if config.sft is not None:
        return _plan_given_rows(config, step, rollout)
    scored = np.asarray(rollout.rewards, dtype=np.float64)
    live = np.flatnonzero(~np.isnan(scored))  # rows whose reward did not fail; own: that the step sampled itself
    own = live < (sampled := rollout.sampled).num_rows  # reused rows are the last ones
    if not own.any():
        failure = next((shard.failure for shard in rollout.shards if shard.failure), "no message")
        raise RewardFailureError(f"all {sampled.num_rows} rewards of step {step} failed; the first failure: {failure}")
    rewards = scored[live]
    groups = number_groups(as_int64(rollout.group_ids)[live])
    shaped = _shape(config, rollout, live, rewards, row_kl)
    prefixes = None if prompts is None else (prompts[live], as_int64(rollout.prompt_lengths)[live])
    plan = _plan(config, step, rollout, live, shaped.loss_tokens, groups, prefixes)
    inputs = AdvantageInputs.from_rows(
        shaped.rewards,
        groups,
        response_lengths=as_int64(rollout.loss_tokens)[live],  # an environment's tokens don't count
        loss_tokens=shaped.loss_tokens,
        parts=_parts(config, rollout, live, shaped.rewards - rewards),
    )
    return StepAdvantages(
        rows=live,
        advantages=estimate(config.advantage, inputs),
        turns=_of_turns(config, rollout, live, inputs),
        plan=plan,
        metrics=_metrics(rewards[own], shaped.rewards[own], groups[own], sampled)
        | _shape(config, rollout, live[own], rewards[own], row_kl).metrics
        | {"tokens": Sum(value=_num_tokens(rollout)), "rows/skipped": Sum(value=plan.num_skipped_rows)},
    )


def _plan_given_rows(config: RunConfig, step: int, rollout: RolloutHandle) -> StepAdvantages:
    """Plan the updates of supervised fine-tuning, whose rows have neither rewards nor advantages."""
    loss_tokens = as_int64(rollout.loss_tokens)
    rows = np.arange(rollout.num_rows)
    plan = _plan(config, step, rollout, rows, loss_tokens, prefixes=rollout.prefixes)
    return StepAdvantages(
        rows=rows,
        advantages=None,
        turns=None,
        plan=plan,
        metrics={
            "response/tokens": response_metrics(rollout)["response/tokens"],
            "tokens": Sum(value=_num_tokens(rollout)),
            "rows/skipped": Sum(value=plan.num_skipped_rows),
        },
    )


def _plan(
    config: RunConfig,
    step: int,
    rollout: RolloutHandle,
    rows: Ints,
    loss_tokens: Ints,
    groups: Ints | None = None,
    prefixes: PrefixesLike = None,
) -> StepPlan:
    apart = np.asarray(rollout.pairs_apart, dtype=np.float64)
    return plan_step(
        as_int64(rollout.prompt_lengths)[rows],
        as_int64(rollout.response_lengths)[rows],
        loss_tokens,
        num_updates=config.optim.updates_per_step,
        num_ranks=config.runtime.num_policy_ranks,
        token_budget=config.packing.token_budget,
        seed=config.seed + step,
        groups=groups,
        prefixes=prefixes if config.packing.share_prompts else None,
        pairs_apart=apart[rows] if apart.size else apart,
    )


def _parts(config: RunConfig, rollout: RolloutHandle, live: Ints, shaping: Floats) -> Parts:
    """Return the parts of a weighted reward, if the estimator takes them; the overlong penalty is one more."""
    if not isinstance(config.advantage, GdpoAdvantage) or not isinstance(config.reward, WeightedReward):
        return ()
    parts = []
    for name, part in config.reward.parts.items():
        values = np.asarray(rollout.part(name), dtype=np.float64)[live]
        if num_lacking := int(np.isnan(values).sum()):
            raise UserError(
                f'{num_lacking} of {len(live)} rows of step {rollout.step} have a reward without the part "{name}", '
                'which advantage.kind = "gdpo" needs of each; a group of data.reuse must come from a run whose reward '
                "has this part"
            )
        parts.append((part.weight, values))
    return [*parts, (config.overlong.penalty, shaping)]


def _of_turns(
    config: RunConfig, rollout: RolloutHandle, live: Ints, inputs: AdvantageInputs
) -> tuple[Ints, NDArray[np.float32]] | None:
    if not isinstance(config.advantage, TurnLevelAdvantage):
        return None
    rewards = np.asarray(rollout.turn_rewards, dtype=np.float64) * config.reward.environment_weight
    turns = Turns(as_int64(rollout.num_turns), rewards).take(live)
    return turns.counts, advantages_of_turns(config.advantage, inputs, turns)


def _shape(
    config: RunConfig, rollout: RolloutHandle, live: Ints, rewards: Floats, row_kl: Sequence[float] | None
) -> ShapedRows:
    assert row_kl is None or len(row_kl) == rollout.num_rows, "row_kl must have one value per row of the rollout"
    return shape_rows(
        rewards,
        response_lengths=as_int64(rollout.loss_tokens)[live],
        loss_tokens=as_int64(rollout.loss_tokens)[live],
        is_truncated=np.asarray(rollout.truncated, dtype=np.bool_)[live],
        row_kl=None if row_kl is None else np.asarray(row_kl)[live].tolist(),
        overlong=config.overlong,
        kl=config.kl,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def _metrics(rewards: Floats, shaped: Floats, groups: Ints, sampled: RolloutHandle) -> Metrics:
    """Return the metrics of the rows that the step sampled, of which those with a reward are given."""
    is_equal = find_equal(shaped, groups, int(groups.max()) + 1)
    low, high = np.quantile(rewards, (0.1, 0.9)).tolist()
    num_failed = sampled.num_rows - len(rewards)
    return {
        "reward": Mean(total=float(rewards.sum()), weight=len(rewards)),
        "reward/p10": Single(value=low),
        "reward/p90": Single(value=high),
        "reward/failed": Sum(value=num_failed),
        "reward/failed_fraction": Mean(total=num_failed, weight=sampled.num_rows),
        "groups/zero_variance": Mean(total=int(is_equal.sum()), weight=len(is_equal)),
        **response_metrics(sampled),
    }


def _num_tokens(rollout: RolloutHandle) -> int:
    return int(as_int64(rollout.response_lengths).sum() + as_int64(rollout.prompt_lengths).sum())
