"""A curriculum's schedules: shares by success rate, how closely the prompts follow them, and what they depend on."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rollout.curriculum import (
    WHOLE,
    count_results,
    draw_sources,
    plan_sources,
    recorded_steps,
    source_metrics,
)
from schemas.config.run import RunConfig
from schemas.metrics import values
from schemas.rollout import RolloutShard, SourceResults, SourceSchedule
from tests.support.configs import run_config


def config_of(
    weights: list[float], *, num_prompts: int = 8, staleness: int = 0, steps: int = 100, **curriculum: object
) -> RunConfig:
    sources = [{"path": f"{number}.parquet", "weight": weight} for number, weight in enumerate(weights)]
    return run_config(
        steps=steps,
        data={"train_path": "", "sources": sources, "curriculum": {"kind": "sources", **curriculum}},
        rollout={"num_prompts": num_prompts},
        runtime={"max_staleness": staleness},
        correction={"kind": "truncated"},
    )


def run(config: RunConfig, rates: list[float], num_steps: int, seed: int = 0) -> dict[int, SourceResults]:
    """Return the results of the steps of a run whose sources are solved at these rates, one sample per prompt."""
    random, recorded = np.random.default_rng(seed), dict[int, SourceResults]()
    for step in range(num_steps):
        schedule = plan_sources(config, range(step, step + 1), recorded)[step]
        taken = np.bincount(draw_sources(schedule, config.rollout.num_prompts), minlength=len(rates))
        recorded[step] = SourceResults(
            schedule=schedule, num_scored=taken.tolist(), num_successes=random.binomial(taken, rates).tolist()
        )
    return recorded


def results(scored: list[int], solved: list[int]) -> SourceResults:
    zeros = (0,) * len(scored)
    schedule = SourceSchedule(shares=(WHOLE, *zeros[1:]), credits=zeros, positions=zeros)
    return SourceResults(schedule=schedule, num_scored=scored, num_successes=solved)


def test_shares_by_hand() -> None:
    config = config_of([1.0, 1.0, 2.0], window=1)
    assert plan_sources(config, range(1), {})[0].shares == (250_000, 250_000, 500_000)  # by weight alone
    # Rates of (3 + 1) / (6 + 2), (6 + 1) / (6 + 2) and, without samples, 1 / 2; factors of 1, 4 * 7 / 64 and 1.
    shares = plan_sources(config, range(1, 2), {0: results([6, 6, 0], [3, 6, 0])})[1].shares
    total = Fraction(1) + Fraction(7, 16) + 2
    assert shares == (round(WHOLE / total), round(WHOLE * Fraction(7, 16) / total), round(2 * WHOLE / total))
    assert sum(shares) == WHOLE


@pytest.mark.parametrize("num_solved", [0, 1000])
def test_what_is_always_or_never_solved_keeps_the_floor(num_solved: int) -> None:
    config = config_of([1.0, 3.0], window=1, min_factor=0.2)
    shares = plan_sources(config, range(1, 2), {0: results([1000, 1000], [500, num_solved])})[1].shares
    assert shares == (625_000, 375_000)  # 1 to 3 * 0.2


def test_only_the_window_counts() -> None:
    config = config_of([1.0, 1.0], window=2)
    later = {1: results([9, 9], [4, 9]), 2: results([9, 9], [5, 9])}
    shares = [
        plan_sources(config, range(3, 4), {0: results([9, 9], first), **later})[3].shares for first in ([0, 0], [9, 1])
    ]
    assert shares[0] == shares[1]
    assert shares[0][0] > shares[0][1]


def test_the_order_within_a_step_by_hand() -> None:
    schedule = SourceSchedule(shares=(250_000, 750_000), credits=(0, 0), positions=(0, 0))
    assert draw_sources(schedule, 8).tolist() == [1, 0, 1, 1, 1, 0, 1, 1]
    owed = schedule.replace(credits=(600_000, -600_000))
    assert draw_sources(owed, 4).tolist() == [0, 1, 1, 0]


SOURCES = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1)), min_size=2, max_size=5)  # weights and rates


@given(sources=SOURCES, num_prompts=st.integers(1, 20), seed=st.integers(0, 2**20), first=st.integers(0, 29))
def test_prompts_follow_the_shares(sources: list, num_prompts: int, seed: int, first: int) -> None:
    weights, rates = map(list, zip(*sources, strict=True))
    steps = [*run(config_of(weights, num_prompts=num_prompts), rates, 30, seed).values()][first:]
    due = np.array([step.schedule.shares for step in steps]).sum(0) / WHOLE * num_prompts
    taken = np.array([step.num_scored for step in steps]).sum(0)
    assert (abs(taken - due) < len(sources)).all()
    for step, after in pairwise(steps):
        assert sum(step.schedule.shares) == WHOLE
        assert sum(step.schedule.credits) == 0
        assert np.array_equal(np.array(step.schedule.positions) + step.num_scored, after.schedule.positions)


def test_a_solved_source_makes_room_for_one_that_is_solved_half_of_the_time() -> None:
    recorded = run(config_of([1.0, 1.0, 1.0], num_prompts=32), [1.0, 0.5, 0.0], 20)
    assert recorded[0].schedule.shares == (333_334, 333_333, 333_333)
    easy, half, hard = recorded[19].schedule.shares
    assert easy < 150_000 > hard
    assert half > 700_000


@given(sources=SOURCES, staleness=st.integers(0, 3), window=st.integers(1, 5), seed=st.integers(0, 2**20))
def test_a_schedule_depends_on_surely_finished_steps_alone(
    sources: list, staleness: int, window: int, seed: int
) -> None:
    weights, rates = map(list, zip(*sources, strict=True))
    config = config_of(weights, staleness=staleness, window=window, steps=20)
    recorded = run(config, rates, 20, seed)
    for step in range(20):
        steps = config.sampled_steps(step)
        needed = recorded_steps(config, steps)
        # Rows of `steps` are sampled when these are finished: off-policy, while the step before trains.
        assert needed.stop <= max(0, step - min(1, staleness))
        assert len(needed) <= window + 2 * staleness + 1
        planned = plan_sources(config, steps, {each: recorded[each] for each in needed})
        assert planned == {each: recorded[each].schedule for each in steps}


def test_results_are_counted_over_all_rows_with_a_reward() -> None:
    config = config_of([1.0, 1.0], success_threshold=0.5)
    schedule = plan_sources(config, range(1), {})[0]  # groups alternate
    shards = [shard_with([0, 0, 1, 1], [1.0, 0.4, None, 0.5]), shard_with([2, 2], [0.5, None]), shard_with([], [])]
    assert config.data.curriculum is not None
    counted = count_results(schedule, shards, config.data.curriculum)
    assert (counted.num_scored, counted.num_successes) == ((3, 1), (2, 1))
    assert values(source_metrics(config.data.source_names, counted)) == {
        "data/0/share": 0.5,
        "data/0/success_rate": pytest.approx(2 / 3),
        "data/1/share": 0.5,
        "data/1/success_rate": 1.0,
    }
    assert "data/0/success_rate" not in source_metrics(["0", "1"], results([0, 1], [0, 1]))


def shard_with(groups: list[int], rewards: list[float | None]) -> RolloutShard:
    ones = [1] * len(groups)
    lengths = {"prompt_lengths": ones, "response_lengths": ones, "loss_tokens": ones, "truncated": ones}
    return RolloutShard(
        shard=0, worker=0, groups=tuple(sorted({*groups})), rewards=rewards, group_ids=groups, **lengths
    )
