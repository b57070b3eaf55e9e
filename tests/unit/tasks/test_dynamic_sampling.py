"""Steps whose flat groups are replaced by those of further prompts; whole runs: tests/end_to_end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rollout.dynamic_sampling import (
    count_generated,
    find_variance,
    keep_rows,
    kept_groups,
    next_groups,
    shard_groups,
)
from schemas.config.rollout import DynamicSampling, TransformersRollout
from schemas.metrics import values
from schemas.rollout import PER_ROW, RolloutHandle, RolloutShard

REWARDS = {
    "wrong": (0.0, 0.0),
    "right": (1.0, 1.0),
    "failed": (None, None),
    "half-failed": (None, 1.0),
    "mixed": (0.0, 1.0),
}


# The fields of a shard that don't have one number per row.
OTHER_FIELDS = {
    *("shard", "worker", "groups", "reused", "turn_rewards", "parts", "token_lag", "begun", "unfinished", "samples"),
    *("failure", "failures", "seconds", "turns", "telemetry"),
}


def config_of(num_prompts: int, max_rounds: int | None, num_workers: int = 1) -> TransformersRollout:
    sampling = None if max_rounds is None else DynamicSampling(max_rounds=max_rounds)
    return TransformersRollout(
        num_prompts=num_prompts, samples_per_prompt=2, num_workers=num_workers, dynamic_sampling=sampling
    )


def rounds_of(config: TransformersRollout, rewards: Sequence[tuple[float | None, ...]]) -> list[list[RolloutShard]]:
    """Return what the workers report round by round, where group g has `rewards[g]`, and the prompt's length says g."""
    rounds: list[list[RolloutShard]] = []
    while groups := next_groups(config, find_variance(rounds), len(rounds)):
        shards = shard_groups(config, groups, sum(map(len, rounds)))
        rounds.append([shard_with(shard, shard % config.num_workers, own, rewards) for shard, own in shards.items()])
    return rounds


def shard_with(
    shard: int, worker: int, groups: Sequence[int], rewards: Sequence[tuple[float | None, ...]]
) -> RolloutShard:
    rows = [(group, reward) for group in groups for reward in rewards[group]]
    return RolloutShard(
        shard=shard,
        worker=worker,
        groups=tuple(groups),
        rewards=tuple(reward for _, reward in rows),
        group_ids=tuple(group for group, _ in rows),
        prompt_lengths=tuple(group + 1 for group, _ in rows),
        response_lengths=(3,) * len(rows),
        loss_tokens=(3,) * len(rows),
        truncated=(0,) * len(rows),
        parts={"style": tuple(reward for _, reward in rows)} if any(reward is not None for _, reward in rows) else {},
        seconds={"generate": 1.0, "reward": 0.5},
    )


def handle_of(config: TransformersRollout, rounds: Sequence[Sequence[RolloutShard]]) -> RolloutHandle:
    return RolloutHandle(
        step=0, policy_version=0, shards=keep_rows(config, rounds), generated=count_generated(rounds, config)
    )


outcomes = st.lists(st.sampled_from(list(REWARDS.values())), min_size=100, max_size=100)


@given(num_prompts=st.integers(1, 8), max_rounds=st.integers(1, 5), num_workers=st.integers(1, 4), rewards=outcomes)
def test_a_step_gets_its_batch_or_what_there_is(
    num_prompts: int, max_rounds: int, num_workers: int, rewards: list[tuple[float | None, ...]]
) -> None:
    config = config_of(num_prompts, max_rounds, num_workers)
    rounds = rounds_of(config, rewards)
    assert rounds == rounds_of(config, rewards)
    sizes = [sum(shard.num_rows for shard in shards) // 2 for shards in rounds]
    assert sizes[0] == num_prompts
    assert len(sizes) <= max_rounds
    assert all(1 <= size <= num_prompts for size in sizes)

    mixed = [group for group in range(sum(sizes)) if rewards[group] == REWARDS["mixed"]]
    # No round is asked for once the batch is full, and none is left out while it isn't.
    full = [sum(group < sum(sizes[: done + 1]) for group in mixed) >= num_prompts for done in range(len(sizes))]
    assert not any(full[:-1])
    assert full[-1] or len(sizes) == max_rounds

    step = handle_of(config, rounds)
    expected = mixed[:num_prompts] or list(range(num_prompts))
    assert sorted(set(step.group_ids)) == expected
    assert step.num_rows == 2 * len(expected)
    assert list(step.prompt_lengths) == [group + 1 for group in step.group_ids]
    assert list(step.rewards) == [reward for group in step.group_ids[::2] for reward in rewards[group]]
    assert [shard.shard for shard in step.shards] == list(range(len(step.shards)))
    assert [group for shard in step.shards for group in shard.groups] == list(range(sum(sizes)))
    assert list(step.group_ids) == sorted(step.group_ids)
    metrics = values(step.metrics)
    assert metrics["rollout/rounds"] == len(sizes)
    assert metrics["rollout/groups_generated"] == sum(sizes)
    assert metrics["rollout/groups_dropped"] == sum(sizes) - len(expected)


@given(num_prompts=st.integers(1, 8), num_workers=st.integers(1, 4), rewards=outcomes)
def test_without_dynamic_sampling_there_is_one_round_and_all_is_kept(
    num_prompts: int, num_workers: int, rewards: list[tuple[float | None, ...]]
) -> None:
    config = config_of(num_prompts, None, num_workers)
    (shards,) = rounds_of(config, rewards)
    assert keep_rows(config, [shards]) == tuple(shards)


def test_a_round_asks_for_as_many_as_the_spreads_so_far_let_expect() -> None:
    config = config_of(8, 3)
    assert next_groups(config, [], 0) == range(8)
    assert next_groups(config, [True] * 7 + [False], 1) == range(8, 10)  # 1 missing, 7 of 8 have one: 8/7, rounded up
    assert next_groups(config, [True] * 4 + [False] * 4, 1) == range(8, 16)  # 4 missing, one in two
    assert next_groups(config, [True] + [False] * 7, 1) == range(8, 16)  # 56 would do, but a round has at most 8
    assert next_groups(config, [False] * 8, 1) == range(8, 16)
    assert not next_groups(config, [True] * 8, 1)
    assert not next_groups(config, [True] * 9, 1)
    assert not next_groups(config, [False] * 24, 3)
    assert kept_groups(config, [False, True] * 10) == [1, 3, 5, 7, 9, 11, 13, 15]


def test_rewards_whose_parts_cancel_but_for_rounding_are_no_variance() -> None:
    rounds = rounds_of(config_of(2, None), [(0.1 + 0.2 - 0.3, 0.0), (1e-6, 0.0)])
    assert find_variance(rounds) == [False, True]


def test_what_was_generated_is_counted_by_hand() -> None:
    config = config_of(3, 2, num_workers=2)
    kinds = ("wrong", "mixed", "half-failed", "mixed", "failed", "mixed")
    rounds = rounds_of(config, [REWARDS[kind] for kind in kinds])
    assert [[shard.group_ids for shard in shards] for shards in rounds] == [
        [(0, 0, 1, 1), (2, 2)],
        [(3, 3, 4, 4), (5, 5)],
    ]
    step = handle_of(config, rounds)
    assert [(shard.shard, shard.worker, shard.groups, shard.kept) for shard in step.shards] == [
        (0, 0, (0, 1), (1,)),
        (1, 1, (2,), ()),
        (2, 0, (3, 4), (3,)),
        (3, 1, (5,), (5,)),
    ]
    assert step.rewards == (0.0, 1.0) * 3
    assert step.shards[2].parts == {"style": (0.0, 1.0)}
    assert values(step.metrics) == {
        "reward_style": 0.5,  # of the rows that are kept, as the reward is
        "rollout/generate_seconds": 2.0,  # of two rounds
        "rollout/reward_seconds": 1.0,
        "rollout/rounds": 2,
        "rollout/groups_generated": 6,
        "rollout/groups_dropped": 3,
        "rollout/zero_variance": 0.5,
        "rollout/reward": 4 / 9,  # of all rewards that did not fail: 0 0, 0 1, 1, 0 1, 0 1
        "rollout/failed": 3,
        "rollout/tokens": 36,
        "rollout/staleness": 0,
    }


def test_rows_are_cut_from_every_field_that_has_one_number_per_row() -> None:
    assert set(RolloutShard.model_fields) - set(PER_ROW) == OTHER_FIELDS, (
        "a field with one number per row must be PackedInts or PackedFloats, so that `keep` cuts it; name any other "
        "one in OTHER_FIELDS"
    )
    columns = dict.fromkeys(PER_ROW, (1, 2, 3)) | {"group_ids": (4, 7, 4)}
    turn_rewards, style = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0), {"style": (0.5, 0.25, None)}
    whole = RolloutShard(shard=0, worker=0, groups=(4, 7), turn_rewards=turn_rewards, parts=style, **columns)
    kept = whole.keep({4})
    assert {name: tuple(getattr(kept, name)) for name in PER_ROW} == {
        name: (values[0], values[2]) for name, values in columns.items()
    }
    assert (kept.turn_rewards, kept.parts) == ((0.0, 3.0, 4.0, 5.0), {"style": (0.5, None)})
    for name in PER_ROW:
        with pytest.raises(ValueError, match="have other lengths"):
            whole.replace(**{name: columns[name][:2]})
