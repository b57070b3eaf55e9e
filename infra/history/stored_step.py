"""A finished step as its run stored it: what the step's stages can be run again from. N rows of the rollout."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import pyarrow as pa

from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from rl_core.columns.jagged import BRANCH_COLUMNS, PREFIX_COLUMN, branches_of, pairs_apart, row_lengths, split_rows
from rl_core.columns.prompts import number_prefixes, repeat_prompts, rows_of_prompts
from rl_core.rollout.responses import describe_responses
from rl_core.views import new_batch
from schemas.batch import BatchHandle, ChunkRef
from schemas.catalog import REWARD_PART_PREFIX
from schemas.errors import RunError
from schemas.plan import StepPlan
from schemas.rollout import ReusedGroup, RolloutHandle, RolloutShard
from schemas.step import StepReport

TURNS = "turn_tokens"  # a column of responses of several turns

# What `shard_of` reads, besides the columns of rewards; those that take most bytes aren't among them.
_SCALARS = {
    *("prompt_ids", "response_ids", "loss_mask", "finish_reason", "sample_id", "group_id", "turn_rewards"),
    *(*BRANCH_COLUMNS, PREFIX_COLUMN),
}


class StoredStep:
    """One finished step whose columns a run keeps.

    Args:
        directory: The run.
        store: Its columns.
        step: The step.
        report: Its report; None: it isn't finished.

    Raises:
        RunError: The step isn't finished, or its columns weren't kept.
    """

    def __init__(self, directory: RunDirectory, store: FsspecColumnStore, step: int, report: StepReport | None) -> None:
        batch = store.load_batch(step)
        if report is None or batch is None:
            lacks = "is not finished" if report is None else "has no columns any more"
            raise RunError(f"step {step} of run {directory.run_id} {lacks}")
        self.step, self.report, self.batch = step, report, batch  # the batch is that of the rows that were trained on
        self.plan: StepPlan | None = directory.plans.load(step)
        self._store, self._directory = store, directory

    @cached_property
    def columns(self) -> pa.RecordBatch:
        """The rollout's columns of all N rows, with those whose reward failed; checked against their checksums.

        Raises:
            StoreError: A chunk is lost or damaged.
        """
        names = self._chunks[0].schema.names  # those of reused groups may be in another order
        return (
            pa.Table.from_batches([rows.select(names) for rows in self._rows_of_chunks])
            .combine_chunks()
            .to_batches()[0]
        )

    @cached_property
    def rows(self) -> BatchHandle:
        """The batch of all N rows, as it was when the rollout had been stored."""
        stored = pa.chunked_array([chunk["prompt_ids"] for chunk in self._chunks]).combine_chunks()
        return new_batch(
            run_id=self.batch.run_id,
            step=self.step,
            policy_version=self.batch.policy_version,
            chunks=_rollout_chunks(self.batch),
            dtypes=rollout_columns(self.batch),
            prompt_lengths=row_lengths(self.columns["prompt_ids"]),
            response_lengths=row_lengths(self.columns["response_ids"]),
            prompt_rows=rows_of_prompts(stored),
        )

    @cached_property
    def rollout(self) -> RolloutHandle:
        """What the driver knew of the N rows: all that the advantages and the plan are computed from."""
        first_reused = self._directory.config().first_reused_group
        shards = tuple(shard_of(number, chunk, first_reused) for number, chunk in enumerate(self._rows_of_chunks))
        return RolloutHandle(step=self.step, policy_version=self.batch.policy_version, shards=shards)

    def release(self) -> None:
        """Free what was read of the columns, which are read again when they are needed."""
        for name in ("columns", "rows", "rollout", "_chunks", "_rows_of_chunks"):
            vars(self).pop(name, None)

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
        return [self.read_chunk(ref) for ref in _rollout_chunks(self.batch)]

    @cached_property
    def _rows_of_chunks(self) -> list[pa.RecordBatch]:
        return [repeat_prompts(chunk) for chunk in self._chunks]


def rollout_columns(batch: BatchHandle) -> dict[str, str]:
    """Return the dtypes of the columns that a step's rollout has stored, by name."""
    own = _rollout_chunks(batch)
    return {name: dtype for group in batch.groups if group.chunks == own for name, dtype in group.dtypes.items()}


def _rollout_chunks(batch: BatchHandle) -> tuple[ChunkRef, ...]:
    return next(group.chunks for group in batch.groups if "response_ids" in group.dtypes)


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


def shard_of(number: int, columns: pa.RecordBatch, first_reused: int) -> RolloutShard:
    """Return what the driver knows of a shard's rows, from those of their columns that `is_scalar` names.

    Args:
        number: The shard's number within the step.
        columns: Its rows' columns.
        first_reused: The number from which groups are reused ones.
    """
    ids = columns["group_id"].to_pylist()
    groups = tuple(sorted(set(ids)))
    origins = dict(zip(ids, columns["sample_id"].to_pylist(), strict=True)) if groups[-1] >= first_reused else {}
    parts = {name for name in columns.schema.names if name.startswith(REWARD_PART_PREFIX)}
    turns = TURNS in columns.schema.names
    prompts, responses = row_lengths(columns["prompt_ids"]), row_lengths(columns["response_ids"])
    may_branch = BRANCH_COLUMNS[-1] in columns.schema.names  # steps of 0.3.0 have turns, and no such column
    branches = branches_of(*(columns[name] for name in BRANCH_COLUMNS)) if may_branch else None
    prefixes: Sequence[int] = ()
    if PREFIX_COLUMN in columns.schema.names:
        prefixes = number_prefixes(split_rows(columns["prompt_ids"]), columns[PREFIX_COLUMN].to_numpy()).tolist()
    return RolloutShard(
        shard=number,
        worker=0,
        groups=groups,
        reused=tuple(ReusedGroup.of(origins[group]) for group in groups) if origins else (),
        rewards=tuple(columns["reward"].to_pylist()),
        group_ids=tuple(ids),
        prompt_lengths=tuple(prompts.tolist()),
        **describe_responses(
            split_rows(columns["response_ids"]), split_rows(columns["loss_mask"]), columns["finish_reason"].to_pylist()
        ),
        num_turns=tuple(row_lengths(columns[TURNS]).tolist()) if turns else (),
        turn_rewards=tuple(columns["turn_rewards"].flatten().to_pylist()) if turns else (),
        pairs_apart=tuple(pairs_apart(prompts, responses, branches)) if branches else (),
        prefixes=tuple(prefixes),
        prefix_lengths=tuple(columns[PREFIX_COLUMN].to_pylist()) if prefixes else (),
        parts={name.removeprefix(REWARD_PART_PREFIX): tuple(columns[name].to_pylist()) for name in sorted(parts)},
    )


def is_scalar(name: str) -> bool:
    """Return whether the scalars of rows are made of this column."""
    return name in _SCALARS or name == "reward" or name.startswith(REWARD_PART_PREFIX)
