"""Rollout: bring the workers to the policy's version, generate and score, and refill the step where groups are flat.

A group is the samples of one prompt; its number within the step says what it is. It has a spread if not all of its
rewards are equal, failed ones aside; without one, its advantages are 0.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect import get_run_logger

from infra.cluster import call
from schemas.config.rollout import RolloutConfig
from schemas.metrics import Max, Mean, Metrics, Sum
from schemas.rollout import RolloutHandle, RolloutShard, check_failures
from schemas.step import PolicyHandle, RunHandle
from tasks.publish import bring_to
from tasks.stage import stage
from tasks.workers import deal


@stage("rollout")
async def generate_rollouts(run: RunHandle, policy: PolicyHandle) -> RolloutHandle:
    """Generate and score this step's samples, in as many rounds as it takes; the rows stay with their workers.

    They are sampled by the policy's own version, or by an older one where `runtime.max_staleness` allows it.

    Raises:
        RewardFailureError: More of the step's rewards failed than the config allows.
    """
    rounds: list[list[RolloutShard]] = []
    while groups := next_groups(run.config.rollout, find_spreads(rounds), len(rounds)):
        rounds.append(await _generate(run, policy, groups, first_shard=sum(map(len, rounds))))
        _check_failures(run, policy, rounds)
    rollout = RolloutHandle(
        step=policy.step,
        policy_version=run.config.sampler_version(policy.step),
        shards=keep_rows(run.config.rollout, rounds),
        generated=count_generated(rounds, run.config.rollout) if run.config.rollout.dynamic_sampling else {},
    )
    if run.config.rollout.dynamic_sampling:
        _tell_what_is_missing(run, rollout, rounds)
    return rollout


async def generate_shard(
    run: RunHandle, policy: PolicyHandle, shard: int, groups: Sequence[int], worker: Any
) -> RolloutShard:
    """Let a worker generate these groups of the policy's step, and hold their rows."""
    version = run.config.sampler_version(policy.step)
    await bring_to(run, version, worker)
    return await call(worker, "generate", policy.step, version, shard, groups)


def cut_shards(config: RolloutConfig, groups: Sequence[int], first_shard: int = 0) -> dict[int, tuple[int, ...]]:
    """The groups that are generated together, by shard: a function of the config, whoever generates them."""
    size = config.prompts_per_batch
    return {first_shard + at // size: tuple(groups[at : at + size]) for at in range(0, len(groups), size)}


def next_groups(config: RolloutConfig, spreads: Sequence[bool], num_rounds: int) -> range:
    """The groups that the next round generates; none: the step has all that it gets.

    The first round generates the step's own groups. Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476,
    section 3.2) then replaces those without a spread, in rounds no larger than the first: as many as it takes
    if groups have a spread as often as those so far.

    Args:
        config: Its `dynamic_sampling` is None where one round is all.
        spreads: Of each group generated so far, by number: whether it has a spread.
        num_rounds: Rounds so far.
    """
    num_groups, num_spread = len(spreads), sum(spreads)
    if not num_rounds:
        return range(config.num_prompts)
    if config.dynamic_sampling is None or num_rounds >= config.dynamic_sampling.max_rounds:
        return range(0)
    missing = max(0, config.num_prompts - num_spread)
    wanted = -(-missing * num_groups // num_spread) if num_spread else missing  # rounded up
    return range(num_groups, num_groups + min(wanted, config.num_prompts))


def kept_groups(config: RolloutConfig, spreads: Sequence[bool]) -> list[int]:
    """The groups that the step keeps: the first with a spread, `num_prompts` at most; if none has one, its own."""
    own = list(range(config.num_prompts))
    if config.dynamic_sampling is None:
        return own
    return [group for group, spread in enumerate(spreads) if spread][: config.num_prompts] or own


def find_spreads(rounds: Sequence[Sequence[RolloutShard]]) -> list[bool]:
    """Of each group of the rounds, by number: whether it has a spread."""
    rewards: dict[int, set[float]] = {}
    for shard in (shard for shards in rounds for shard in shards):
        for group, reward in zip(shard.group_ids, shard.rewards, strict=True):
            rewards.setdefault(group, set()).update(() if reward is None else (reward,))
    return [len(rewards[group]) > 1 for group in range(len(rewards))]


def keep_rows(config: RolloutConfig, rounds: Sequence[Sequence[RolloutShard]]) -> tuple[RolloutShard, ...]:
    """The shards of all rounds, with the kept groups' rows only; one may be left with none."""
    kept = set(kept_groups(config, find_spreads(rounds)))
    return tuple(shard.keep(kept) for shards in rounds for shard in shards)


def count_generated(rounds: Sequence[Sequence[RolloutShard]], config: RolloutConfig) -> Metrics:
    """The metrics of all that was generated for a step, dropped groups included."""
    shards, spreads = [shard for shards in rounds for shard in shards], find_spreads(rounds)
    scored = [reward for shard in shards for reward in shard.rewards]
    rewards = [reward for reward in scored if reward is not None]
    return {
        "rollout/rounds": Max(value=len(rounds)),
        "rollout/groups_generated": Sum(value=len(spreads)),
        "rollout/groups_dropped": Sum(value=len(spreads) - len(kept_groups(config, spreads))),
        "rollout/zero_variance": Mean(total=spreads.count(False), weight=len(spreads)),
        "rollout/reward": Mean(total=sum(rewards), weight=len(rewards)),
        "rollout/failed": Sum(value=len(scored) - len(rewards)),
        "rollout/tokens": Sum(value=sum(sum(shard.response_lengths) for shard in shards)),
    }


async def _generate(run: RunHandle, policy: PolicyHandle, groups: range, first_shard: int) -> list[RolloutShard]:
    """One round."""
    shards = cut_shards(run.config.rollout, groups, first_shard)
    return await deal(run, {shard: partial(generate_shard, run, policy, shard, own) for shard, own in shards.items()})


def _check_failures(run: RunHandle, policy: PolicyHandle, rounds: Sequence[Sequence[RolloutShard]]) -> None:
    # All rounds count together: all rewards of a single group may fail, and it is then replaced.
    shards = [shard for shards in rounds for shard in shards]
    check_failures(
        [reward for shard in shards for reward in shard.rewards],
        next((shard.failure for shard in shards if shard.failure), None),
        run.config.reward.max_failure_fraction,
        f"step {policy.step}",
    )


def _tell_what_is_missing(run: RunHandle, rollout: RolloutHandle, rounds: Sequence[Sequence[RolloutShard]]) -> None:
    spreads, wanted = find_spreads(rounds), run.config.rollout.num_prompts
    if not any(spreads):
        get_run_logger().warning(
            "step %d: none of %d groups has two different rewards, after %d rounds (rollout.dynamic_sampling."
            "max_rounds); it keeps its first %d, whose advantages are 0",
            *(rollout.step, len(spreads), len(rounds), wanted),
        )
    elif sum(spreads) < wanted:
        get_run_logger().warning(
            "step %d: only %d of %d groups have two different rewards, after %d rounds (rollout.dynamic_sampling."
            "max_rounds); it goes on with these instead of %d",
            *(rollout.step, sum(spreads), len(spreads), len(rounds), wanted),
        )
