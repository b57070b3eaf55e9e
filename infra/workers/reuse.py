"""Rows of stored groups that a step trains on again: their scalars for the driver, and a copy in the step's columns.

Both are functions of the stored columns alone: any worker can do them, at any time. N rows.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from infra.history.reuse import read_groups
from infra.history.stored_step import is_scalar, shard_of
from rl_core.columns.jagged import flat_values, row_lengths
from schemas.catalog import REWARD_PART_PREFIX
from schemas.rollout import ReusedGroup, RolloutShard
from schemas.step import RunHandle

_VERSIONS = {"policy_version", "sampler_versions"}


def describe_groups(
    run: RunHandle, step: int, shard: int, groups: Sequence[int], reused: Sequence[ReusedGroup]
) -> RolloutShard:
    """Return the scalars of the groups' rows.

    Raises:
        RunError: A step that they come from is not kept.
        StoreError: Columns are lost or damaged.
    """
    rows = read_groups(run, reused, groups, lambda name: is_scalar(name) or name in _VERSIONS)
    described = shard_of(shard, rows, run.config.first_reused_group)
    reuse = run.config.data.reuse
    if reuse is None or reuse.run is not None:  # the versions of another run are not those of this one
        return described
    return described.replace(token_lag=_token_lag(step, rows))


def copy_groups(
    run: RunHandle, groups: Sequence[int], reused: Sequence[ReusedGroup], reward_parts: Sequence[str]
) -> pa.RecordBatch:
    """Return the groups' rows as rows of the step that trains on them.

    Args:
        run: The run.
        groups: Their numbers within the step, ascending.
        reused: Where they come from.
        reward_parts: The reward parts of all the step's rows, so that all chunks have the same columns.

    Raises:
        RunError: A step that they come from is not kept.
        StoreError: Columns are lost or damaged.
    """
    return _with_parts(read_groups(run, reused, groups), reward_parts)


def _with_parts(rows: pa.RecordBatch, reward_parts: Sequence[str]) -> pa.RecordBatch:
    """Add the reward parts that the rows lack."""
    lacking = [name for part in reward_parts if (name := REWARD_PART_PREFIX + part) not in rows.schema.names]
    for name in lacking:
        rows = rows.append_column(name, pa.nulls(rows.num_rows, pa.float32()))
    return rows


def _token_lag(step: int, rows: pa.RecordBatch) -> int:
    """Return the sum over the rows' tokens of the step minus the version that sampled them."""
    responses = row_lengths(rows["loss_mask"])
    if "sampler_versions" in rows.schema.names:
        return int((step - flat_values(rows["sampler_versions"]).astype(np.int64)).sum())
    return int(((step - rows["policy_version"].to_numpy()) * responses).sum())
