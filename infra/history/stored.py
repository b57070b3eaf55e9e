"""A finished step as its run stored it: what the step's stages can be run again from. N rows of the rollout."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.storage.runs import RunDirectory
from infra.stores.fsspec import FsspecColumnStore
from rl_core.columns.jagged import flat_values, row_lengths
from rl_core.views import new_batch
from schemas.batch import BatchHandle, ChunkRef, ColumnGroup
from schemas.catalog import REWARD_PART_PREFIX
from schemas.errors import RunError
from schemas.plan import StepPlan
from schemas.rollout import RolloutHandle, RolloutShard

TURNS = "turn_tokens"  # a column of responses of several turns


class StoredStep:
    """One finished step whose columns a run keeps.

    Args:
        directory: The run.
        store: Its columns.
        step: The step.

    Raises:
        RunError: The step isn't finished, or its columns weren't kept.
    """

    def __init__(self, directory: RunDirectory, store: FsspecColumnStore, step: int) -> None:
        report, batch = directory.metrics.step(step), store.load_batch(step)
        if report is None or batch is None:
            lacks = "is not finished" if report is None else "has no columns any more"
            raise RunError(f"step {step} of run {directory.run_id} {lacks}")
        self.step, self.report, self.batch = step, report, batch  # the batch is that of the rows that were trained on
        self.plan: StepPlan | None = directory.plans.load(step)
        self._store = store

    @cached_property
    def columns(self) -> pa.RecordBatch:
        """The rollout's columns of all N rows, with those whose reward failed; checked against their checksums.

        Raises:
            StoreError: A chunk is lost or damaged.
        """
        return pa.Table.from_batches(self._chunks).combine_chunks().to_batches()[0]

    @cached_property
    def rows(self) -> BatchHandle:
        """The batch of all N rows, as it was when the rollout had been stored."""
        return new_batch(
            run_id=self.batch.run_id,
            step=self.step,
            policy_version=self.batch.policy_version,
            chunks=self._group.chunks,
            dtypes=self._group.dtypes,
            prompt_lengths=row_lengths(self.columns["prompt_ids"]),
            response_lengths=row_lengths(self.columns["response_ids"]),
        )

    @cached_property
    def rollout(self) -> RolloutHandle:
        """What the driver knew of the N rows: all that the advantages and the plan are computed from."""
        shards = tuple(_shard(number, chunk) for number, chunk in enumerate(self._chunks))
        return RolloutHandle(step=self.step, policy_version=self.batch.policy_version, shards=shards)

    @property
    def has_turns(self) -> bool:
        """Whether an environment answered the model's turns."""
        return TURNS in self.batch.columns

    def verify(self) -> None:
        """Read all of the step's chunks.

        Raises:
            StoreError: One is lost or damaged; the message names it.
        """
        self._store.verify(self.batch)

    def read_chunk(self, ref: ChunkRef) -> pa.RecordBatch:
        """Return one of the step's chunks.

        Raises:
            StoreError: It is lost or damaged.
        """
        return self._store.read_chunk(ref)

    @cached_property
    def _chunks(self) -> list[pa.RecordBatch]:
        return [self.read_chunk(ref) for ref in self._group.chunks]

    @property
    def _group(self) -> ColumnGroup:
        return next(group for group in self.batch.groups if "response_ids" in group.dtypes)


def with_rewards(
    rollout: RolloutHandle, rewards: Sequence[float | None], parts: Mapping[str, Sequence[float | None]]
) -> RolloutHandle:
    """Return the rollout with other rewards: N, and N of each part."""
    stops = list(accumulate(shard.num_rows for shard in rollout.shards))
    shards = []
    for shard, stop in zip(rollout.shards, stops, strict=True):
        own = slice(stop - shard.num_rows, stop)
        of_parts = {name: tuple(values[own]) for name, values in parts.items()}
        shards.append(shard.replace(rewards=tuple(rewards[own]), parts=of_parts))
    return rollout.replace(shards=tuple(shards))


def _shard(number: int, chunk: pa.RecordBatch) -> RolloutShard:
    responses = row_lengths(chunk["response_ids"])
    ends = np.cumsum(responses)
    trained = np.concatenate([[0], np.cumsum(flat_values(chunk["loss_mask"]))])
    groups = chunk["group_id"].to_pylist()
    parts = {name for name in chunk.schema.names if name.startswith(REWARD_PART_PREFIX)}
    turns = TURNS in chunk.schema.names
    return RolloutShard(
        shard=number,
        worker=0,
        groups=tuple(sorted(set(groups))),
        rewards=tuple(chunk["reward"].to_pylist()),
        group_ids=tuple(groups),
        prompt_lengths=tuple(row_lengths(chunk["prompt_ids"]).tolist()),
        response_lengths=tuple(responses.tolist()),
        loss_tokens=tuple((trained[ends] - trained[ends - responses]).tolist()),
        truncated=tuple(pc.equal(chunk["finish_reason"], "length").cast(pa.int8()).to_pylist()),
        num_turns=tuple(row_lengths(chunk[TURNS]).tolist()) if turns else (),
        turn_rewards=tuple(chunk["turn_rewards"].flatten().to_pylist()) if turns else (),
        parts={name.removeprefix(REWARD_PART_PREFIX): tuple(chunk[name].to_pylist()) for name in sorted(parts)},
    )
