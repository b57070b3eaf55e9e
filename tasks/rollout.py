"""The rollout stage: sync the workers' weights, generate and score samples, and replace zero-variance groups."""

from collections.abc import Sequence
from functools import partial

from prefect import get_run_logger

from infra.workers.generate import generate_shard
from infra.workers.launch import rollout_pool
from rl_core.rollout.dynamic_sampling import (
    count_generated,
    find_variance,
    keep_rows,
    next_groups,
    shard_groups,
    short_batch_warning,
)
from schemas.rollout import RolloutHandle, RolloutShard, check_failures
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import stage


@stage("rollout")
async def generate_rollouts(run: RunHandle, policy: PolicyHandle) -> RolloutHandle:
    """Generate and score this step's samples, in as many rounds as needed; the rows stay on their workers.

    They are sampled from the policy's own version, or from an older one if `runtime.max_staleness` allows it.

    Raises:
        RewardFailureError: More of the step's rewards failed than the config allows.
    """
    config, rounds = run.config.rollout, list[list[RolloutShard]]()
    while groups := next_groups(config, find_variance(rounds), len(rounds)):
        rounds.append(await _generate_round(run, policy, groups, first_shard=sum(map(len, rounds))))
        _check_failures(run, policy, rounds)
    if (warning := short_batch_warning(config, policy.step, rounds)) is not None:
        get_run_logger().warning(warning)
    return RolloutHandle(
        step=policy.step,
        policy_version=run.config.sampler_version(policy.step),
        shards=keep_rows(config, rounds),
        generated=count_generated(rounds, config) if config.dynamic_sampling else {},
    )


async def _generate_round(run: RunHandle, policy: PolicyHandle, groups: range, first_shard: int) -> list[RolloutShard]:
    shards = shard_groups(run.config.rollout, groups, first_shard)
    jobs = {shard: partial(generate_shard, run, policy, shard, own) for shard, own in shards.items()}
    return await rollout_pool(run).dispatch(jobs)


def _check_failures(run: RunHandle, policy: PolicyHandle, rounds: Sequence[Sequence[RolloutShard]]) -> None:
    # Count all rounds together: it is no error if all rewards of a single group fail, since it is then replaced.
    shards = [shard for shards in rounds for shard in shards]
    check_failures(
        [reward for shard in shards for reward in shard.rewards],
        next((shard.failure for shard in shards if shard.failure), None),
        run.config.reward.max_failure_fraction,
        f"step {policy.step}",
    )
