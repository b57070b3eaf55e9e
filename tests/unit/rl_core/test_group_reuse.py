"""Which groups a step may reuse, and its metrics; numbers are computed by hand."""

from pathlib import Path

import pytest

from rl_core.advantages import prepare_updates
from rl_core.rollout.reuse import draw_groups, reusable_steps, reuse_metrics
from schemas.metrics import values
from schemas.rollout import ReusedGroup, RolloutHandle, RolloutShard
from tests.support.configs import run_config

GROUPS = [ReusedGroup(step=step, group=group) for step in (3, 4) for group in range(10)]


def config_of(**reuse: object):  # type: ignore[no-untyped-def]
    fields = {"correction": {"kind": "truncated"}, "store": {"keep_steps": "all"}, "rollout": {"num_prompts": 1}}
    return run_config(Path(), data={"reuse": {"num_groups": 2, **reuse}}, **fields)


def shard_with(number: int, group: int, rewards: tuple[float, ...], **fields: object) -> RolloutShard:
    """A shard of one group whose rows have 2 prompt tokens and 4, 5, ... response tokens."""
    count = len(rewards)
    return RolloutShard(
        shard=number,
        worker=0,
        groups=(group,),
        rewards=rewards,
        group_ids=(group,) * count,
        prompt_lengths=(2,) * count,
        response_lengths=tuple(range(4, 4 + count)),
        loss_tokens=tuple(range(4, 4 + count)),
        truncated=(0,) * count,
        parts={"letters": rewards},
        **fields,
    )


SAMPLED = shard_with(0, 0, (1.0, 0.0))
# 15 tokens, 2 steps old.
REUSED = shard_with(1, 1, (5.0, 3.0, 4.0), reused=(ReusedGroup(step=3, group=7),), token_lag=30)


def test_a_step_takes_groups_of_finished_steps_of_the_age() -> None:
    own = config_of(max_age=3)
    assert [list(reusable_steps(own, step)) for step in (0, 1, 5)] == [[], [0], [2, 3, 4]]
    assert list(reusable_steps(config_of(run="other", steps=(4, 6)), 0)) == [4, 5]


def test_draws_depend_on_seed_and_step_and_repeat_no_group() -> None:
    drawn = draw_groups(GROUPS, 5, 0, 1)
    assert len(set(drawn)) == 5
    assert list(drawn) == sorted(drawn, key=GROUPS.index)
    assert draw_groups(GROUPS, 5, 0, 1) == drawn
    assert len({draw_groups(GROUPS, 5, seed, step) for seed in (0, 1) for step in (1, 2)}) == 4
    assert draw_groups(GROUPS[:2], 5, 0, 1) == tuple(GROUPS[:2])
    assert draw_groups([], 5, 0, 1) == ()


def test_every_group_is_drawn_equally_often() -> None:
    counts = dict.fromkeys(GROUPS, 0)
    for step in range(2000):
        for group in draw_groups(GROUPS, 5, 0, step):
            counts[group] += 1
    assert all(count == pytest.approx(500, abs=100) for count in counts.values())


def test_metrics_of_reuse() -> None:
    assert values(reuse_metrics(config_of(max_age=2), 5, [REUSED])) == {
        "reuse/groups": 1,
        "reuse/rows": 3,
        "reuse/age": 2,
    }
    other = config_of(run="other", steps=(0, 6))
    assert values(reuse_metrics(other, 5, [REUSED])) == {"reuse/groups": 1, "reuse/rows": 3}
    assert values(reuse_metrics(config_of(max_age=2), 0, [])) == {"reuse/groups": 0, "reuse/rows": 0}


def test_staleness_is_over_the_tokens_of_all_of_the_runs_own_rows() -> None:
    def staleness(version: int, *shards: RolloutShard) -> float:
        return values(RolloutHandle(step=5, policy_version=version, shards=shards).metrics)["rollout/staleness"]

    assert staleness(5, SAMPLED) == 0
    assert staleness(5, SAMPLED, REUSED) == 30 / (9 + 15)
    assert staleness(4, SAMPLED, REUSED) == (9 + 30) / (9 + 15)
    assert staleness(4, SAMPLED, REUSED.replace(token_lag=None)) == 1  # of another run


def test_reused_rows_are_trained_on_but_are_not_the_steps_rewards() -> None:
    rollout = RolloutHandle(step=5, policy_version=5, shards=(SAMPLED, REUSED))
    alone = prepare_updates(config_of(max_age=2), 5, RolloutHandle(step=5, policy_version=5, shards=(SAMPLED,)))
    both = prepare_updates(config_of(max_age=2), 5, rollout)
    assert both.plan.updates[0].num_live_sequences == 5
    assert both.advantages[:2].tolist() == alone.advantages.tolist()
    assert both.advantages[2:].tolist() == pytest.approx([1, -1, 0], abs=1e-5)
    metrics, before = values(both.metrics), values(alone.metrics)
    assert metrics.pop("tokens") - before.pop("tokens") == 3 * 2 + 15
    assert metrics == before
    assert values(rollout.metrics)["reward_letters"] == 0.5
