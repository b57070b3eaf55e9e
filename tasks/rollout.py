"""The rollout stage: sync the workers' weights, generate and score samples, and replace zero-variance groups."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prefect import get_run_logger

from infra.history.reuse import choose_groups
from infra.ray.actors import call
from infra.storage.runs import RunDirectory, find_schedules
from infra.stores.open import open_store
from infra.stores.step_columns import drop_journals
from infra.workers.generate import generate_shard
from infra.workers.launch import get_group, rollout_pool
from rl_core.rollout.curriculum import count_results, source_metrics
from rl_core.rollout.dynamic_sampling import (
    count_generated,
    find_variance,
    keep_rows,
    next_groups,
    shard_groups,
    short_batch_warning,
)
from rl_core.rollout.reuse import reuse_metrics
from schemas.errors import RewardFailureError, StoreError
from schemas.metrics import Metrics, Sum, merge_metrics
from schemas.packed import PackedFloats
from schemas.rollout import (
    PartialGroups,
    ReusedGroup,
    RolloutHandle,
    RolloutShard,
    SourceResults,
    SourceSchedule,
    check_failures,
)
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import stage


@stage("rollout")
async def generate_rollouts(
    run: RunHandle, policy: PolicyHandle, before: RolloutHandle | None = None, is_new: bool = False
) -> RolloutHandle:
    """Generate and score this step's samples, in as many rounds as needed; the rows stay on their workers.

    They are sampled from the policy's own version, or from older ones if `runtime.max_staleness` allows it. With
    `data.reuse`, groups of stored steps follow them. In supervised fine-tuning, they are rows of the data set.

    Args:
        run: The run.
        policy: The policy whose step it is.
        before: The rollout of the step before, whose unfinished rows are continued; None: there are none.
        is_new: Whether it was stored just now, so that no durable rows are read to check them; lost ones are an error.

    Raises:
        RewardFailureError: More of the step's rewards failed than the config allows.
        RunError: A stored step whose groups may be trained on again is not kept.
    """
    if run.config.sft is not None:
        return await _describe_rows(run, policy)
    config, rounds, schedules = run.config.rollout, list[list[RolloutShard]](), find_schedules(run, policy.step)
    failures: str | None = None
    begun = await _find_begun(run, before, is_new) if before else {}
    if not begun and policy.step and run.config.runtime.max_staleness > 1:
        get_run_logger().warning(
            "the unfinished rows before step %d are lost: they are resampled with version %d only, so that the run "
            "is no longer the same as an undisturbed one",
            policy.step,
            run.config.sampler_version(policy.step),
        )
    while groups := next_groups(config, find_variance(rounds) if config.dynamic_sampling else [], len(rounds)):
        rounds.append(await _generate_round(run, policy, groups, sum(map(len, rounds)), begun, schedules))
        failures = _check_failures(run, policy, rounds)
    if failures is not None:
        get_run_logger().warning(failures)
    if (warning := short_batch_warning(config, policy.step, rounds)) is not None:
        get_run_logger().warning(warning)
    reused = await _describe_reused(run, policy, sum(map(len, rounds)))
    sources = _count_results(run, rounds, schedules.get(policy.step))
    generated: Metrics = count_generated(rounds, config) if config.dynamic_sampling else {}
    if run.config.data.reuse is not None:
        generated |= reuse_metrics(run.config, policy.step, reused)
    return RolloutHandle(
        step=policy.step,
        policy_version=run.config.sampler_version(policy.step),
        shards=(*keep_rows(config, rounds), *reused),
        generated=generated | (source_metrics(run.config.data.source_names, sources) if sources else {}),
        sources=sources,
    )


async def _describe_rows(run: RunHandle, policy: PolicyHandle) -> RolloutHandle:
    """Return the scalars of the rows that the data set has for the step."""
    group = await get_group(run, "policy")
    shard, metrics = await call(group.ranks[0], "describe_rows", policy.step)
    return RolloutHandle(step=policy.step, policy_version=policy.version, shards=(shard,), generated=metrics)


async def _generate_round(
    run: RunHandle,
    policy: PolicyHandle,
    groups: range,
    first_shard: int,
    begun: Mapping[int, Sequence[PartialGroups]],
    schedules: Mapping[int, SourceSchedule],
) -> list[RolloutShard]:
    shards = shard_groups(run.config.rollout, groups, first_shard)
    jobs = {
        shard: partial(generate_shard, run, policy, shard, own, begun.get(shard, ()), schedules)
        for shard, own in shards.items()
    }
    return await rollout_pool(run).dispatch(jobs)


async def _describe_reused(run: RunHandle, policy: PolicyHandle, first_shard: int) -> list[RolloutShard]:
    """Choose the stored groups that the step trains on again, and return what the driver has to know of their rows."""
    reused, first = choose_groups(run, policy.step), run.config.first_reused_group
    shards = shard_groups(run.config.rollout, range(first, first + len(reused)), first_shard)
    jobs = {
        shard: partial(_describe, policy.step, shard, groups, reused[groups[0] - first : groups[-1] + 1 - first])
        for shard, groups in shards.items()
    }
    return await rollout_pool(run).dispatch(jobs)


async def _describe(
    step: int, shard: int, groups: Sequence[int], reused: Sequence[ReusedGroup], worker: Any
) -> RolloutShard:
    described: RolloutShard = await call(worker, "describe_reused", step, shard, groups, reused)
    return described


async def _find_begun(run: RunHandle, before: RolloutHandle, is_new: bool) -> dict[int, Sequence[PartialGroups]]:
    """Return what a rollout has left unfinished, by shard; nothing if it is lost or damaged, or of other shards."""
    store, left = open_store(run), [shard for shard in before.shards if shard.unfinished]
    shards = shard_groups(run.config.rollout, range(run.config.rollout.num_prompts), 0)
    if any(tuple(shards.get(shard.shard, ())) != shard.groups for shard in left):
        get_run_logger().warning(
            "the unfinished rows of step %d were sampled in other batches than those of rollout.batch_prompts = %d",
            before.step,
            run.config.rollout.prompts_per_batch,
        )
        return {}
    try:
        if not (is_new and run.config.store.is_durable):
            parts = [part for shard in left for part in shard.unfinished]
            await asyncio.gather(*(asyncio.to_thread(store.verify, part.batch) for part in parts))
    except StoreError as error:
        get_run_logger().warning("the unfinished rows of step %d can't be read: %s", before.step, error)
        return {}
    return {shard.shard: shard.unfinished for shard in left}


def _count_results(
    run: RunHandle, rounds: Sequence[Sequence[RolloutShard]], schedule: SourceSchedule | None
) -> SourceResults | None:
    """Count the successes of each source in all rounds; None without a curriculum."""
    if schedule is None or run.config.data.curriculum is None:
        return None
    return count_results(schedule, [shard for shards in rounds for shard in shards], run.config.data.curriculum)


def _check_failures(run: RunHandle, policy: PolicyHandle, rounds: Sequence[Sequence[RolloutShard]]) -> str | None:
    # Count all rounds together: it is no error if all rewards of a single group fail, since it is then replaced.
    shards = [shard for shards in rounds for shard in shards]
    if reasons := {name: reason for shard in shards for name, reason in shard.failures.items()}:
        RunDirectory.of(run).failures.save(policy.step, reasons)
    try:
        return check_failures(
            PackedFloats.concat(shard.rewards for shard in shards),
            next((shard.failure for shard in shards if shard.failure), None),
            run.config.reward.max_failure_fraction,
            f"step {policy.step}",
        )
    except RewardFailureError:
        if merge_metrics(shard.turns for shard in shards).get("turns/failed", Sum(value=0)).value:
            drop_journals(run, policy.step)  # else the environments' failures are taken from there when it is resumed
        raise
