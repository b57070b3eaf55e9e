"""Reuse: groups of stored steps that a step trains on again (`data.reuse`), drawn by (seed, step).

Their rows keep the tokens, rewards and sampler log-probs with which they were stored; the correction weighs them.
"""

from collections.abc import Sequence

import numpy as np

from rl_core.rollout.seeding import derive_seed
from schemas.config.run import RunConfig
from schemas.metrics import Mean, Metrics, Sum
from schemas.rollout import ReusedGroup, RolloutShard


def reusable_steps(config: RunConfig, step: int) -> range:
    """Return the stored steps from which `step` may take groups: of another run, or finished ones of its own.

    Example:
        >>> values = {"steps": 9, "model": {"path": "tiny"}, "reward": {"kind": "exact"}, "store": {"keep_steps": 9}}
        >>> values |= {"correction": {"kind": "truncated"}, "runtime": {"max_staleness": 1}}
        >>> reuse = {"num_groups": 2, "max_age": 3}
        >>> config = RunConfig.model_validate(values | {"data": {"train_path": "train.jsonl", "reuse": reuse}})
        >>> reusable_steps(config, 1), reusable_steps(config, 7)
        (range(0, 0), range(4, 6))
    """
    reuse = config.data.reuse
    if reuse is None:
        return range(0)
    if reuse.steps is not None:
        return range(*reuse.steps)
    assert reuse.max_age is not None
    # When rows are sampled ahead, the step before is still being trained on.
    return range(max(0, step - reuse.max_age), max(0, step - min(1, config.runtime.max_staleness)))


def draw_groups(found: Sequence[ReusedGroup], num_groups: int, seed: int, step: int) -> tuple[ReusedGroup, ...]:
    """Draw groups without replacement, all with the same probability; return them in the order of `found`."""
    random = np.random.Generator(np.random.PCG64(derive_seed(seed, "reuse", step)))
    drawn = np.sort(random.permutation(len(found))[:num_groups])
    return tuple(found[at] for at in drawn.tolist())


def reuse_metrics(config: RunConfig, step: int, shards: Sequence[RolloutShard]) -> Metrics:
    """Return the metrics of a step's reused groups."""
    num_rows = sum(shard.num_rows for shard in shards)
    metrics: Metrics = {
        "reuse/groups": Sum(value=sum(len(shard.reused) for shard in shards)),
        "reuse/rows": Sum(value=num_rows),
    }
    if num_rows and config.data.reuse is not None and config.data.reuse.run is None:
        metrics["reuse/age"] = Mean(total=sum(_ages(step, shard) for shard in shards), weight=num_rows)
    return metrics


def _ages(step: int, shard: RolloutShard) -> int:
    """Return the sum over rows of the steps since they were sampled."""
    origins = dict(zip(shard.groups, shard.reused, strict=True))
    return sum(step - origins[group].step for group in shard.group_ids)
