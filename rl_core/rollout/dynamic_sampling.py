"""Dynamic sampling: zero-variance groups are replaced by groups of further prompts, in rounds.

A group is the samples of one prompt, identified by its number within the step. It has zero variance if all of its
rewards, except failed ones, are equal: its advantages are then 0 with every estimator. DAPO, Yu et al. 2025,
arXiv:2503.14476, section 3.2.
"""

from collections.abc import Sequence

import numpy as np

from rl_core.advantages.base import find_equal
from rl_core.views.integers import as_int64
from schemas.config.rollout import RolloutConfig
from schemas.metrics import Mean, Metrics, Single, Sum
from schemas.packed import PackedFloats, PackedInts
from schemas.rollout import RolloutShard

Rounds = Sequence[Sequence[RolloutShard]]


def shard_groups(config: RolloutConfig, groups: Sequence[int], first_shard: int = 0) -> dict[int, tuple[int, ...]]:
    """Return the groups of each shard, one batch, by its number; the split doesn't depend on the workers."""
    size = config.prompts_per_batch
    return {first_shard + at // size: tuple(groups[at : at + size]) for at in range(0, len(groups), size)}


def next_groups(config: RolloutConfig, has_variance: Sequence[bool], num_rounds: int) -> range:
    """Return the groups to generate in the next round; none if the step is complete.

    The first round generates the step's own `num_prompts` groups. Dynamic sampling then replaces zero-variance groups,
    in rounds no larger than the first: as many groups as needed if they have variance as often as those so far.

    Args:
        config: A single round if `dynamic_sampling` is None.
        has_variance: Whether each group generated so far has variance, by group number.
        num_rounds: The number of rounds so far.
    """
    num_groups, num_useful = len(has_variance), sum(has_variance)
    if not num_rounds:
        return range(config.num_prompts)
    if config.dynamic_sampling is None or num_rounds >= config.dynamic_sampling.max_rounds:
        return range(0)
    missing = max(0, config.num_prompts - num_useful)
    wanted = -(-missing * num_groups // num_useful) if num_useful else missing  # rounded up
    return range(num_groups, num_groups + min(wanted, config.num_prompts))


def kept_groups(config: RolloutConfig, has_variance: Sequence[bool]) -> list[int]:
    """Return the groups that the step keeps: the first `num_prompts` with variance; its own groups if none has any."""
    own = list(range(config.num_prompts))
    if config.dynamic_sampling is None:
        return own
    return [group for group, useful in enumerate(has_variance) if useful][: config.num_prompts] or own


def find_variance(rounds: Rounds) -> list[bool]:
    """Return whether each group of the rounds has variance, by group number."""
    shards = [shard for shards in rounds for shard in shards]
    rewards = np.asarray(PackedFloats.concat(shard.rewards for shard in shards), dtype=np.float64)
    groups = as_int64(PackedInts.concat(shard.group_ids for shard in shards))
    scored, num_groups = ~np.isnan(rewards), int(groups.max(initial=-1)) + 1
    has_variance: list[bool] = (~find_equal(rewards[scored], groups[scored], num_groups)).tolist()
    return has_variance


def keep_rows(config: RolloutConfig, rounds: Rounds) -> tuple[RolloutShard, ...]:
    """Return the shards of all rounds with only the rows of kept groups; a shard may be left without rows."""
    shards = [shard for shards in rounds for shard in shards]
    if config.dynamic_sampling is None:
        return tuple(shards)
    kept = set(kept_groups(config, find_variance(rounds)))
    return tuple(shard.keep(kept) for shard in shards)


def count_generated(rounds: Rounds, config: RolloutConfig) -> Metrics:
    """Return the metrics over all groups generated for a step, including dropped ones."""
    shards, has_variance = [shard for shards in rounds for shard in shards], find_variance(rounds)
    scored = PackedFloats.concat(shard.rewards for shard in shards)
    rewards = scored.present
    return {
        "rollout/rounds": Single(value=len(rounds)),
        "rollout/groups_generated": Sum(value=len(has_variance)),
        "rollout/groups_dropped": Sum(value=len(has_variance) - len(kept_groups(config, has_variance))),
        "rollout/zero_variance": Mean(total=has_variance.count(False), weight=len(has_variance)),
        "rollout/reward": Mean(total=sum(rewards), weight=len(rewards)),
        "rollout/failed": Sum(value=len(scored) - len(rewards)),
        "rollout/tokens": Sum(value=sum(sum(shard.response_lengths) for shard in shards)),
    }


def short_batch_warning(config: RolloutConfig, step: int, rounds: Rounds) -> str | None:
    """Return a warning if dynamic sampling ended with fewer useful groups than the config asks for, else None."""
    if config.dynamic_sampling is None:
        return None
    has_variance, wanted = find_variance(rounds), config.num_prompts
    if sum(has_variance) >= wanted:
        return None
    after = f"after {len(rounds)} rounds (rollout.dynamic_sampling.max_rounds)"
    if not any(has_variance):
        return (
            f"step {step}: all {len(has_variance)} groups have zero variance {after}; the step keeps its first "
            f"{wanted}, whose advantages are 0"
        )
    return (
        f"step {step}: only {sum(has_variance)} of {len(has_variance)} groups have different rewards {after}; the step "
        f"keeps these instead of {wanted}"
    )
