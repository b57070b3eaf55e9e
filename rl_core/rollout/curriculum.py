"""A curriculum by success rate: sources that are sometimes solved are taken more often.

The weight of a source is multiplied by 4 p (1 - p), where p is the recent success rate of its samples: by 1 if half of
them succeed, by almost nothing if all or none do, so that their groups have no variance. Rutherford et al. 2024,
arXiv:2408.15099, call p (1 - p) a task's learnability. The rates are those of whole sources or levels of difficulty, as
in DUMP, Wang et al. 2025, arXiv:2504.09710.

Everything is computed with integers and fractions: the order of prompts must not depend on rounding. K sources, P
prompts per step.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from rl_core.views.integers import as_int64
from schemas.config.data import CurriculumSettings
from schemas.config.run import RunConfig
from schemas.metrics import Mean, Metrics, Single
from schemas.rollout import RolloutShard, SourceResults, SourceSchedule

WHOLE = 1_000_000  # the unit of shares and credits is one millionth


def plan_sources(config: RunConfig, steps: range, recorded: Mapping[int, SourceResults]) -> dict[int, SourceSchedule]:
    """Return the schedules of several steps in a row, by step.

    That of step k is a function of the results of the steps before k - `runtime.max_staleness`, which are finished
    whenever k is sampled: also ahead, or again by a resumed run.

    Args:
        config: The run, with a curriculum.
        steps: The steps.
        recorded: Results of earlier steps: at least those of `recorded_steps(config, steps)`.
    """
    num_known = max(0, steps.start - config.runtime.max_staleness)
    if num_known:
        step, schedule = num_known - 1, recorded[num_known - 1].schedule
    else:
        num_sources = len(config.data.source_weights)
        shares, zeros = _shares(config, 0, recorded), (0,) * num_sources
        step, schedule = 0, SourceSchedule(shares=shares, credits=zeros, positions=zeros)
    schedules = {step: schedule}
    for later in range(step + 1, steps.stop):
        schedule = _advance(schedule, config.rollout.num_prompts, _shares(config, later, recorded))
        schedules[later] = schedule
    return {step: schedules[step] for step in steps}


def recorded_steps(config: RunConfig, steps: range) -> range:
    """Return the earlier steps on whose results the schedules of `steps` depend."""
    assert config.data.curriculum is not None
    lag = config.runtime.max_staleness
    oldest = steps.start - lag - config.data.curriculum.window - lag  # of the first step that has to be computed
    return range(max(0, oldest), max(0, steps.stop - 1 - lag))


def draw_sources(schedule: SourceSchedule, count: int) -> NDArray[np.int64]:
    """Return the source of each of a step's first `count` prompts: int64 [count].

    Each prompt adds its share to every source's credit, and is taken from the source with the most, the first of
    equals, which pays one prompt for it. So what was taken from a source, over any number of steps, differs from the
    sum of its shares by less than K prompts.
    """
    return _draw(schedule, count)[0]


def count_results(
    schedule: SourceSchedule, shards: Sequence[RolloutShard], curriculum: CurriculumSettings
) -> SourceResults:
    """Count the samples of each source, and its successes.

    Args:
        schedule: The step's.
        shards: All rows that were generated for the step, with their group's number within the step.
        curriculum: What a success is.
    """
    rewards = np.concatenate([np.asarray(shard.rewards, dtype=np.float64) for shard in shards])  # NaN: it failed
    groups = np.concatenate([as_int64(shard.group_ids) for shard in shards])
    sources = draw_sources(schedule, int(groups.max()) + 1)[groups]
    num_sources = len(schedule.shares)
    scored, solved = ~np.isnan(rewards), rewards >= curriculum.success_threshold
    return SourceResults(
        schedule=schedule,
        num_scored=tuple(np.bincount(sources[scored], minlength=num_sources).tolist()),
        num_successes=tuple(np.bincount(sources[solved], minlength=num_sources).tolist()),
    )


def source_metrics(names: Sequence[str], results: SourceResults) -> Metrics:
    """Return the share of each source in a step's prompts, and its success rate if it has samples."""
    metrics: Metrics = {}
    counts = zip(names, results.schedule.shares, results.num_scored, results.num_successes, strict=True)
    for name, share, num_scored, num_successes in counts:
        metrics[f"data/{name}/share"] = Single(value=share / WHOLE)
        if num_scored:
            metrics[f"data/{name}/success_rate"] = Mean(total=num_successes, weight=num_scored)
    return metrics


def _shares(config: RunConfig, step: int, recorded: Mapping[int, SourceResults]) -> tuple[int, ...]:
    """Return the shares of a step, in millionths: by weight, and by the success rates of its window."""
    curriculum = config.data.curriculum
    assert curriculum is not None
    num_known = max(0, step - config.runtime.max_staleness)
    window = [recorded[known] for known in range(max(0, num_known - curriculum.window), num_known)]
    lowest = Fraction(str(curriculum.min_factor))  # the decimal as written: 0.1 is 1/10
    weights = []
    for source, weight in enumerate(config.data.source_weights):
        num_scored = sum(results.num_scored[source] for results in window)
        num_successes = sum(results.num_successes[source] for results in window)
        # The mean of the rate given the counts, if all rates were equally likely before: 1/2 without samples.
        rate = Fraction(num_successes + 1, num_scored + 2)
        weights.append(Fraction(str(weight)) * max(lowest, 4 * rate * (1 - rate)))
    return _in_millionths(weights)


def _in_millionths(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the weights' shares in a million, rounded by largest remainder so that their sum is a million."""
    exact = [weight * WHOLE / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: shares[source] - exact[source])
    for source in by_remainder[: WHOLE - sum(shares)]:
        shares[source] += 1
    return tuple(shares)


def _advance(schedule: SourceSchedule, num_prompts: int, shares: tuple[int, ...]) -> SourceSchedule:
    """Return the schedule of the step after one, of the given shares."""
    sources, left = _draw(schedule, num_prompts)
    taken = np.bincount(sources, minlength=len(shares))
    positions = tuple((np.array(schedule.positions) + taken).tolist())
    return SourceSchedule(shares=shares, credits=tuple(left.tolist()), positions=positions)


def _draw(schedule: SourceSchedule, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sources of the first `count` prompts, and the credits after them: int64 [count], int64 [K]."""
    owed, shares = np.array(schedule.credits, dtype=np.int64), np.array(schedule.shares, dtype=np.int64)
    sources = np.empty(count, dtype=np.int64)
    for prompt in range(count):
        owed += shares
        sources[prompt] = source = owed.argmax()
        owed[source] -= WHOLE
    return sources, owed
