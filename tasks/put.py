"""The put stage: the rollout workers store their own rows, and the driver gets one batch handle."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from infra.ray.actors import call
from infra.storage.runs import find_schedules
from infra.stores.open import open_store
from infra.stores.step_columns import publish_handle
from infra.workers.generate import generate_shard
from infra.workers.launch import get_group, rollout_pool
from rl_core.views import decode_ints, new_batch
from schemas.errors import ChunkNotFoundError
from schemas.rollout import PER_ROW, PutResult, RolloutHandle, RolloutShard
from schemas.step import PolicyHandle, RunHandle, StoredBatch
from tasks.stage import stage


@stage("put")
async def put_columns(run: RunHandle, policy: PolicyHandle, rollout: RolloutHandle) -> StoredBatch:
    """Have every rollout worker put the rows that it holds; regenerate rows that were lost with a worker.

    In supervised fine-tuning, the policy's rank 0 puts them.
    """
    shards, parts = [shard for shard in rollout.shards if shard.num_rows], rollout.reward_parts
    if run.config.sft is not None:
        results = [await call((await get_group(run, "policy")).ranks[0], "put_rows", policy.step)]
    else:
        results = await rollout_pool(run).dispatch(
            {shard.shard: partial(_put, run, policy, rollout, parts, shard) for shard in shards},
            owners={
                shard.shard: shard.worker
                for shard in shards
                if not shard.reused and shard.worker < run.config.rollout.num_workers  # it may still exist
            },
        )
    batch = new_batch(
        run_id=run.run_id,
        step=policy.step,
        policy_version=rollout.policy_version,
        chunks=[result.chunk for result in results],
        dtypes=results[0].dtypes,
        prompt_lengths=rollout.prompt_lengths,
        response_lengths=rollout.response_lengths,
        prompt_rows=prompt_rows(results),
    )
    return publish_handle(open_store(run), batch, [result.traffic for result in results])


def prompt_rows(results: Sequence[PutResult]) -> np.ndarray:
    """Return the row with each row's prompt, [N], numbered over the concatenation of the results' chunks."""
    rows, num_rows = [np.empty(0, np.int64)], 0
    for result in results:
        size = result.chunk.num_rows
        own = np.arange(size) if result.prompt_rows is None else decode_ints(result.prompt_rows)
        rows.append(num_rows + own)
        num_rows += size
    return np.concatenate(rows)


async def _put(
    run: RunHandle,
    policy: PolicyHandle,
    rollout: RolloutHandle,
    parts: tuple[str, ...],
    shard: RolloutShard,
    worker: Any,
) -> PutResult:
    if shard.reused:
        reused: PutResult = await call(
            worker, "put_reused", rollout.step, shard.shard, shard.groups, shard.reused, parts
        )
        return reused
    args = rollout.step, rollout.policy_version, shard.shard, shard.kept, parts
    if (result := await call(worker, "put", *args, shard.worker)) is None:  # the worker doesn't hold the rows
        schedules = find_schedules(run, policy.step)
        again = await generate_shard(run, policy, shard.shard, shard.groups, shard.begun, schedules, worker)
        _check_same_rows(shard, again.keep(shard.kept), f"shard {shard.shard} of step {rollout.step}")
        result = await call(worker, "put", *args, again.worker)
    return result


def _check_same_rows(before: RolloutShard, again: RolloutShard, name: str) -> None:
    """Check that rows that were lost, and generated again, are those that the rollout describes."""
    if any(getattr(before, field) != getattr(again, field) for field in PER_ROW):
        raise ChunkNotFoundError(
            f"the rows of {name} were lost with their worker, and generating them again gave others, as another "
            "device or engine setting may"
        )
