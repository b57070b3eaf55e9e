"""Rollout: bring the workers to the policy's version, generate and score, and refill the step where groups are flat.

A group is the samples of one prompt; its number within the step says what it is. It has a spread if not all of its
rewards are equal, failed ones aside; without one, its advantages are 0.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import get_run_logger

from infra.cluster import call, get_worker
from schemas.config.rollout import RolloutConfig
from schemas.metrics import Max, Mean, Metrics, Sum
from schemas.rollout import RolloutHandle, RolloutShard, check_failures
from schemas.step import PolicyHandle, RunHandle
from tasks.publish import load_weights
from tasks.stage import stage


@stage("rollout")
async def generate_rollouts(run: RunHandle, policy: PolicyHandle) -> RolloutHandle:
    """Generate and score this step's samples, in as many rounds as it takes; the rows stay with their workers.

    Raises:
        RewardFailureError: More of the step's rewards failed than the config allows.
    """
    rounds: list[list[RolloutShard]] = []
    while groups := next_groups(run.config.rollout, find_spreads(rounds), len(rounds)):
        rounds.append(await _generate(run, policy, groups))
        _check_failures(run, policy, rounds)
    rollout = RolloutHandle(
        step=policy.step, policy_version=policy.version, shards=keep_rows(run.config.rollout, rounds)
    )
    if run.config.rollout.dynamic_sampling:
        _tell_what_is_missing(run, rollout, rounds)
    return rollout


async def on_workers(
    run: RunHandle, policy: PolicyHandle, method: str, arguments: Mapping[int, Sequence[object]]
) -> list[Any]:
    """Call a method of rollout workers, by number, once each holds the policy's version; the answers are in order."""

    async def on_worker(shard: int) -> Any:
        worker = await get_worker(run, "rollout", shard)
        await load_weights(run, policy, worker)
        return await call(worker, method, *arguments[shard])

    return await asyncio.gather(*map(on_worker, arguments))


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
    """Each worker's rounds as one shard of the kept groups' rows; it may be left with none.

    A round's shards are those of the first workers, as many as it took: none is larger than the first round.
    """
    spreads = find_spreads(rounds)
    kept = set(kept_groups(config, spreads))
    joined = [
        RolloutShard.join([shards[worker] for shards in rounds if worker < len(shards)])
        for worker in range(len(rounds[0]))
    ]
    return tuple(
        shard.keep(kept).replace(generated=_count_generated(shard, spreads, kept) if config.dynamic_sampling else {})
        for shard in joined
    )


def _count_generated(shard: RolloutShard, spreads: Sequence[bool], kept: set[int]) -> Metrics:
    """The metrics of all that one worker generated for a step, dropped groups included."""
    groups = [group for entry in shard.rounds for group in entry.groups]
    rewards = [reward for reward in shard.rewards if reward is not None]
    return {
        "rollout/rounds": Max(value=len(shard.rounds)),
        "rollout/groups_generated": Sum(value=len(groups)),
        "rollout/groups_dropped": Sum(value=sum(group not in kept for group in groups)),
        "rollout/zero_variance": Mean(total=sum(not spreads[group] for group in groups), weight=len(groups)),
        "rollout/reward": Mean(total=sum(rewards), weight=len(rewards)),
        "rollout/failed": Sum(value=shard.num_rows - len(rewards)),
        "rollout/tokens": Sum(value=sum(shard.response_lengths)),
    }


async def _generate(run: RunHandle, policy: PolicyHandle, groups: range) -> list[RolloutShard]:
    """One round: the groups are dealt to the workers one by one; a worker that gets none isn't asked."""
    num_workers = run.config.rollout.num_workers
    hands = [tuple(groups[worker::num_workers]) for worker in range(num_workers)]
    asked = {worker: (policy.step, policy.version, hand) for worker, hand in enumerate(hands) if hand}
    return await on_workers(run, policy, "generate", asked)


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
